"""How the KV cache lies in memory: pages, element types, packing, bytes per token. No torch, no Triton.

Shapes: N pages, M exact buffers, H KV heads, D head_dim, W storage elements of a token, g stored scales of a token,
E = sink_tokens + recent_tokens. A scale is a dequantization factor: x ~ code * scale.

A page holds PAGE_TOKENS tokens of every head, head-major: one (page, head) is one tile of the attention kernels, and all
of its rows begin at 16-byte boundaries. Codes and scales are separate tensors.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 64

MIN_SCALE = 2.0**-14
"""Floor of a stored scale: the smallest normal float16, so that an all-zero group divides by something."""

MAX_SCALE = 65504.0
"""Ceiling of a stored scale: the largest float16."""

Dtype = Literal["fp16", "bf16", "fp8_e4m3", "int8", "int4"]
Granularity = Literal["none", "per_tensor", "per_head", "per_token", "per_group"]
Spec = tuple[str, tuple[int, ...]]
"""Element type (a name that numpy with ml_dtypes, and torch, know) and shape of a tensor."""

STORAGE: dict[Dtype, str] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
    "int4": "int8",
}
LIMITS: dict[Dtype, float] = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}
BITS: dict[Dtype, int] = {"fp16": 16, "bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}

GRANULARITIES: dict[Dtype, tuple[Granularity, ...]] = {
    "fp16": ("none",),
    "bf16": ("none",),
    "fp8_e4m3": ("per_tensor", "per_head", "per_token"),
    "int8": ("per_tensor", "per_head", "per_token"),
    "int4": ("per_token", "per_group"),
}
KEY_DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "fp8_e4m3", "int8")
GROUP_SIZES = (32, 64, 128)
HEAD_DIMS = (64, 128, 256)


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {value}")


@dataclass(frozen=True)
class SideLayout:
    """How keys or values are stored.

    granularity says what shares a scale: `per_tensor` one per layer, `per_head` one per KV head (static: float32, made
    before anything is written), `per_token` one per token and KV head, `per_group` one per token, KV head and `group_size`
    neighbouring channels (dynamic: made from what is written, stored beside the codes as float16).
    """

    dtype: Dtype
    granularity: Granularity = "none"
    group_size: int | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(Dtype))
        _one_of(f"granularity of dtype {self.dtype}", self.granularity, GRANULARITIES[self.dtype])
        if self.granularity == "per_group":
            _one_of("group_size", self.group_size, GROUP_SIZES)
        elif self.group_size is not None:
            raise ValueError(f"group_size must be None with granularity {self.granularity}, got {self.group_size}")

    @property
    def exact(self) -> bool:
        """Whether nothing is scaled."""
        return self.granularity == "none"

    @property
    def static(self) -> bool:
        """Whether the scales are fixed before anything is written."""
        return self.granularity in ("per_tensor", "per_head")

    @property
    def dynamic(self) -> bool:
        """Whether the scales are made from what is written."""
        return self.granularity in ("per_token", "per_group")

    @property
    def limit(self) -> float:
        """Largest magnitude of a code; KeyError for exact types, which have none."""
        return LIMITS[self.dtype]

    @property
    def storage(self) -> str:
        """Element type of the pool."""
        return STORAGE[self.dtype]

    def width(self, head_dim: int) -> int:
        """W: storage elements of one token of one head."""
        return head_dim // 2 if self.dtype == "int4" else head_dim

    def groups(self, head_dim: int) -> int:
        """g: stored scales of one token of one head, 0 when static or exact."""
        if self.group_size is not None:
            return head_dim // self.group_size
        return 1 if self.dynamic else 0

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one head, its stored scales included."""
        return head_dim * BITS[self.dtype] // 8 + 2 * self.groups(head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """The cache of one layer."""

    kv_heads: int
    head_dim: int
    key: SideLayout
    value: SideLayout
    sink_tokens: int = 0
    """First tokens of a sequence that are also kept in float16."""
    recent_tokens: int = 0
    """Newest tokens of a sequence that are also kept in float16."""

    def __post_init__(self) -> None:
        _one_of("head_dim", self.head_dim, HEAD_DIMS)
        _one_of("key dtype", self.key.dtype, KEY_DTYPES)
        for field, least in (("kv_heads", 1), ("sink_tokens", 0), ("recent_tokens", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, got {getattr(self, field)}")
        size = self.value.group_size
        if size is not None and self.head_dim % size:
            raise ValueError(f"group_size must divide head_dim {self.head_dim}, got {size}: choose 32, 64 or per_token")

    @property
    def exact_tokens(self) -> int:
        """E: slots of an exact buffer."""
        return self.sink_tokens + self.recent_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the pools, all heads, keys and values."""
        return self.kv_heads * (self.key.token_bytes(self.head_dim) + self.value.token_bytes(self.head_dim))

    def pools(self, pages: int) -> dict[str, Spec]:
        """What is paged: `key_pool`, `value_pool` (N, H, 64, W), and `*_scale_pool` (N, H, 64, g) of dynamic sides."""
        rows = (pages, self.kv_heads, PAGE_TOKENS)
        sides = {"key": self.key, "value": self.value}
        codes: dict[str, Spec] = {
            f"{name}_pool": (side.storage, (*rows, side.width(self.head_dim))) for name, side in sides.items()
        }
        return codes | {
            f"{name}_scale_pool": ("float16", (*rows, side.groups(self.head_dim)))
            for name, side in sides.items()
            if side.dynamic
        }

    def static_scales(self) -> dict[str, Spec]:
        """`key_scale`, `value_scale` of static sides: (1) per tensor, (H) per head."""
        return {
            f"{name}_scale": ("float32", (1 if side.granularity == "per_tensor" else self.kv_heads,))
            for name, side in (("key", self.key), ("value", self.value))
            if side.static
        }

    def exact_buffers(self, buffers: int) -> dict[str, Spec]:
        """`key_exact`, `value_exact` (M, H, E, D): slot p of a sequence's buffer holds its sink p; slot
        sink_tokens + r its newest token of which position % recent_tokens is r. Empty without exact tokens."""
        if not self.exact_tokens:
            return {}
        spec: Spec = ("float16", (buffers, self.kv_heads, self.exact_tokens, self.head_dim))
        return {"key_exact": spec, "value_exact": spec}


def pack_int4(codes: npt.NDArray[np.integer]) -> npt.NDArray[np.int8]:
    """Whole numbers -7 to 7 (..., D) -> bytes (..., D / 2): channel d plus 8 in the low bits, channel d + D / 2 in the
    high bits, as the byte's own sign."""
    low, high = np.split(codes.astype(np.int16), 2, axis=-1)
    return (16 * high + low + 8).astype(np.int8)


def unpack_int4(packed: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """The inverse of `pack_int4`."""
    codes: npt.NDArray[np.int8] = np.concatenate([(packed & 15) - 8, packed >> 4], axis=-1)
    return codes
