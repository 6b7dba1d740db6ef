"""Memory layout of the KV cache: pages, element types, packing, bytes per token. Imports neither torch nor Triton.

Shapes: N pages, M exact buffers, H KV heads, D head_dim, W storage elements per token and head, g stored scales per token
and head, E = sink_tokens + recent_tokens. A scale is a dequantization factor: x ~ code * scale.

A page holds PAGE_TOKENS tokens of every head, head-major. One (page, head) is one tile of the attention kernels, and every row
begins at a 16-byte boundary. Codes and scales are separate tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PAGE_TOKENS = 64

Dtype = Literal["fp16", "bf16", "fp8_e4m3", "int8", "int4", "nvfp4"]
Granularity = Literal["none", "per_tensor", "per_head", "per_token", "per_group"]
Spec = tuple[str, tuple[int, ...]]
"""Element type and shape of a tensor. The type is named as torch and numpy with ml_dtypes name it."""

Dims = tuple[int | str, ...]
"""Dimensions of a tensor. A letter stands for any size; equal letters stand for equal sizes."""

NVFP4_GROUP = 16
"""Channels per block of nvfp4."""


@dataclass(frozen=True)
class Codes:
    """Storage and range of a dtype's codes."""

    storage: str
    """Element type of the pool."""
    bits: int
    granularities: tuple[Granularity, ...]
    limit: float = 0.0
    """Largest magnitude of a code; 0 for a dtype without scales."""
    group_sizes: tuple[int, ...] = ()
    scale_storage: str = "float16"
    """Element type of stored scales."""
    layer_scale: bool = False
    """Whether stored scales are in units of one calibrated scale of the layer."""
    keys: bool = True
    """Whether keys may have this dtype. Values may have any dtype."""


_BYTES: tuple[Granularity, ...] = ("per_tensor", "per_head", "per_token")
CODES: dict[Dtype, Codes] = {
    "fp16": Codes("float16", 16, ("none",)),
    "bf16": Codes("bfloat16", 16, ("none",)),
    "fp8_e4m3": Codes("float8_e4m3fn", 8, _BYTES, 448.0),
    "int8": Codes("int8", 8, _BYTES, 127.0),
    "int4": Codes("int8", 4, ("per_token", "per_group"), 7.0, (32, 64, 128), keys=False),
    "nvfp4": Codes("int8", 4, ("per_group",), 6.0, (NVFP4_GROUP,), "float8_e4m3fn", layer_scale=True, keys=False),
}
KEY_DTYPES = tuple(dtype for dtype, codes in CODES.items() if codes.keys)
HEAD_DIMS = (64, 128, 256)


def _check_choice(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {value}")


@dataclass(frozen=True)
class SideLayout:
    """Storage format of the keys, or of the values.

    `granularity` is the set of numbers that share a scale. Static scales are float32 and calibrated before the cache is
    written: `per_tensor` has one per layer, `per_head` one per KV head. Dynamic scales are float16, computed from the numbers
    to store, and stored with the codes: `per_token` has one per token and KV head, `per_group` one per token, KV head
    and `group_size` neighbouring channels. `none` has no scale. nvfp4 has both: an E4M3 scale per block of 16 channels,
    computed from the numbers to store, in units of one calibrated scale of the layer. Raises
    ValueError if the dtype does not support the granularity or the group size.
    """

    dtype: Dtype
    granularity: Granularity = "none"
    group_size: int | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice(f"granularity of dtype {self.dtype}", self.granularity, CODES[self.dtype].granularities)
        if self.granularity == "per_group":
            _check_choice("group_size", self.group_size, CODES[self.dtype].group_sizes)
        elif self.group_size is not None:
            raise ValueError(f"group_size must be None with granularity {self.granularity}, got {self.group_size}")

    @property
    def codes(self) -> Codes:
        """Storage and range of the side's codes."""
        return CODES[self.dtype]

    @property
    def exact(self) -> bool:
        """Whether the side is stored in 16 bits, without scales."""
        return self.granularity == "none"

    @property
    def static(self) -> bool:
        """Whether all scales are calibrated before the cache is used."""
        return self.granularity in ("per_tensor", "per_head")

    @property
    def layer_scale(self) -> bool:
        """Whether stored scales are in units of one calibrated scale of the layer."""
        return self.codes.layer_scale

    @property
    def has_static_scales(self) -> bool:
        """Whether any scale is calibrated before the cache is used."""
        return self.static or self.layer_scale

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.bits == 4

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed when numbers are stored."""
        return self.granularity in ("per_token", "per_group")

    def width(self, head_dim: int) -> int:
        """Return W, the storage elements of one token of one head."""
        return head_dim // 2 if self.packed else head_dim

    def groups(self, head_dim: int) -> int:
        """Return g, the stored scales of one token of one head; 0 if the side is exact or all its scales are static."""
        if self.group_size is not None:
            return head_dim // self.group_size
        return 1 if self.dynamic else 0

    def code_bytes(self, head_dim: int) -> int:
        """Return the bytes of the codes of one token of one head."""
        return head_dim * self.codes.bits // 8

    def token_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token of one head, stored scales included."""
        return self.code_bytes(head_dim) + (1 if self.layer_scale else 2) * self.groups(head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """Cache format of one layer.

    Raises:
        ValueError: No kernel supports the layout.

    Example:
        >>> layout = CacheLayout(8, 128, SideLayout("fp8_e4m3", "per_tensor"), SideLayout("int4", "per_group", 64))
        >>> layout.token_bytes  # 8 heads of 128 bytes of keys, 64 bytes of values and two float16 scales
        1568
    """

    kv_heads: int
    head_dim: int
    key: SideLayout
    value: SideLayout
    sink_tokens: int = 0
    """First tokens of a sequence that are also kept in float16."""
    recent_tokens: int = 0
    """Newest tokens of a sequence that are also kept in float16."""

    def __post_init__(self) -> None:
        _check_choice("head_dim", self.head_dim, HEAD_DIMS)
        _check_choice("key dtype", self.key.dtype, KEY_DTYPES)
        for field, minimum in (("kv_heads", 1), ("sink_tokens", 0), ("recent_tokens", 0)):
            if getattr(self, field) < minimum:
                raise ValueError(f"{field} must be at least {minimum}, got {getattr(self, field)}")
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
        """Return paged tensors: `key_pool`, `value_pool` (N, H, 64, W), and `*_scale_pool` (N, H, 64, g) of dynamic sides."""
        rows = (pages, self.kv_heads, PAGE_TOKENS)
        sides = {"key": self.key, "value": self.value}
        codes: dict[str, Spec] = {
            f"{name}_pool": (side.codes.storage, (*rows, side.width(self.head_dim))) for name, side in sides.items()
        }
        return codes | {
            f"{name}_scale_pool": (side.codes.scale_storage, (*rows, side.groups(self.head_dim)))
            for name, side in sides.items()
            if side.dynamic
        }

    def static_scales(self) -> dict[str, Spec]:
        """Return `key_scale` and `value_scale` if they are calibrated: (H) per head, else (1)."""
        return {
            f"{name}_scale": ("float32", (self.kv_heads if side.granularity == "per_head" else 1,))
            for name, side in (("key", self.key), ("value", self.value))
            if side.has_static_scales
        }

    def exact_buffers(self, buffers: int) -> dict[str, Spec]:
        """Return `key_exact` and `value_exact` (M, H, E, D); nothing for a layout without exact tokens.

        Slot p of a sequence's buffer holds its sink at position p. Slot sink_tokens + r holds its newest token whose
        position % recent_tokens is r.
        """
        if not self.exact_tokens:
            return {}
        spec: Spec = ("float16", (buffers, self.kv_heads, self.exact_tokens, self.head_dim))
        return {"key_exact": spec, "value_exact": spec}

    def tensor_dims(self) -> dict[str, tuple[str, Dims]]:
        """Return all tensors of the cache, with the letters N and M as the numbers of pages and exact buffers."""
        dims_by_name: dict[str, tuple[str, Dims]] = {}
        for letter, tensors in (("N", self.pools(1)), ("M", self.exact_buffers(1))):
            dims_by_name |= {name: (kind, (letter, *shape[1:])) for name, (kind, shape) in tensors.items()}
        return {**dims_by_name, **self.static_scales()}


def dimension_problem(name: str, dims: Sequence[int | None], spec: Dims, sizes: dict[str, int]) -> str | None:
    """Return why a tensor's dimensions do not match `spec`, or None if they do. In `dims`, None is a dimension that varies.

    `sizes`: letter -> its size; new letters are added.
    """
    if len(dims) == len(spec) and all(
        dim == size if isinstance(size, int) else dim is None or sizes.setdefault(size, dim) == dim
        for dim, size in zip(dims, spec, strict=True)
    ):
        return None
    shape = ", ".join("varies" if dim is None else str(dim) for dim in dims)
    return f"{name} must be ({', '.join(str(sizes.get(str(dim), dim)) for dim in spec)}), got ({shape})"
