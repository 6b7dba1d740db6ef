"""KV policies: how keys and values are stored in the cache, and exactly how many bytes that takes.

Legend: D = head_dim, H = num_kv_heads, L = num layers. A scale is a dequantization factor: x ~ code * scale.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.errors import UserError
from pipeline.strict import StrictModel

PAGE_TOKENS = 64
"""Tokens in a page of the pool, fixed by the page layout that every backend and kernel shares."""

SCALE_BYTES = 2
"""Scales that are stored per token or per group are float16."""

EXACT_BYTES = 2
"""Sink and recent tokens are kept as float16."""

POLICY_FILE = "kv_policy.json"
SCALES_FILE = "kv_scales.json"
"""A KVPolicy and its KVScales, beside the quantized checkpoint and in every engine bundle."""

DType = Literal["fp16", "fp8_e4m3", "int8", "int4"]
Granularity = Literal["none", "per_tensor", "per_token", "per_group"]
ScaleSource = Literal["none", "uncalibrated", "calibrated", "dynamic"]

BITS: dict[DType, int] = {"fp16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}
CODE_MAX: dict[DType, float] = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}
"""Largest magnitude of a code; scale = amax / CODE_MAX."""


class Format(StrictModel):
    """How one side of the cache (keys or values) is stored.

    granularity says what shares a scale: `per_tensor` one per layer (static), `per_token` one per token and KV head,
    `per_group` one per token, KV head and `group_size` channels (both dynamic, stored beside the codes as float16).
    scale says where it comes from: `calibrated` by ModelOpt, `uncalibrated` is 1.0, `dynamic` is amax / CODE_MAX of what
    is written.
    """

    dtype: DType
    granularity: Granularity = "none"
    group_size: int | None = None
    symmetric: bool = True
    scale: ScaleSource = "none"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.symmetric:
            raise ValueError("symmetric must be true: asymmetric codes are not implemented")
        if self.dtype == "fp16":
            if (self.granularity, self.scale, self.group_size) != ("none", "none", None):
                raise ValueError("dtype fp16 has no scale: set granularity=none, scale=none and group_size=null")
            return self
        expected: dict[Granularity, tuple[ScaleSource, ...]] = {
            "per_tensor": ("calibrated", "uncalibrated") if self.dtype == "fp8_e4m3" else ("calibrated",),
            "per_token": ("dynamic",),
            "per_group": ("dynamic",),
        }
        if self.granularity not in expected:
            raise ValueError(f"granularity must be one of {', '.join(expected)} for dtype {self.dtype}, got none")
        if self.scale not in expected[self.granularity]:
            allowed = " or ".join(expected[self.granularity])
            raise ValueError(f"scale must be {allowed} for {self.dtype} {self.granularity}, got {self.scale}")
        if self.granularity == "per_group" and self.group_size not in (16, 32, 64, 128):
            raise ValueError(f"group_size must be 16, 32, 64 or 128, got {self.group_size}")
        if self.granularity != "per_group" and self.group_size is not None:
            raise ValueError(f"group_size must be null for granularity {self.granularity}, got {self.group_size}")
        return self

    @property
    def static(self) -> bool:
        """Whether one scale per layer is fixed at build time (and stored once, not per token)."""
        return self.granularity == "per_tensor"

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one token of one KV head."""
        return head_dim * BITS[self.dtype] // 8

    def scales_per_token(self, head_dim: int) -> int:
        """Stored scales of one token of one KV head: 0 when static or unscaled, 1 per token, D / group_size per group."""
        if self.granularity == "per_group":
            assert self.group_size is not None
            return head_dim // self.group_size
        return 1 if self.granularity == "per_token" else 0

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one KV head, its scales included."""
        return self.code_bytes(head_dim) + SCALE_BYTES * self.scales_per_token(head_dim)


@dataclass(frozen=True)
class KVShape:
    """The part of a model's shape that the cache depends on."""

    layers: int
    kv_heads: int
    head_dim: int


class KVPolicy(StrictModel):
    """A cache format for keys, one for values, and how many tokens at either end stay exact (float16)."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    key: Format
    value: Format
    sink_tokens: int = Field(default=0, ge=0, le=1024)
    recent_tokens: int = Field(default=0, ge=0, le=4096)

    @property
    def quantized(self) -> bool:
        return self.key.dtype != "fp16" or self.value.dtype != "fp16"

    @property
    def exact_tokens(self) -> int:
        """Tokens per sequence that are also kept as float16 (the pool holds every token, these included)."""
        return self.sink_tokens + self.recent_tokens

    def check_shape(self, shape: KVShape) -> None:
        """Raise UserError when a group does not divide the model's head_dim."""
        for side, form in (("key", self.key), ("value", self.value)):
            if form.group_size is not None and shape.head_dim % form.group_size:
                raise UserError(
                    f"kv.{side}.group_size={form.group_size} does not divide the model's head_dim {shape.head_dim}; "
                    "choose one that does, or granularity=per_token"
                )

    def bytes_per_token(self, shape: KVShape) -> int:
        """Bytes that one more token costs in the paged pools of all layers, per-token scales included."""
        per_head = self.key.token_bytes(shape.head_dim) + self.value.token_bytes(shape.head_dim)
        return shape.layers * shape.kv_heads * per_head

    def pool_bytes(self, shape: KVShape, pages: int) -> int:
        """Bytes of the pools of all layers for `pages` pages."""
        return pages * PAGE_TOKENS * self.bytes_per_token(shape)

    def exact_bytes(self, shape: KVShape, sequences: int) -> int:
        """Bytes of the float16 sink and recent buffers of `sequences` sequences, keys and values, all layers."""
        return sequences * self.exact_tokens * shape.layers * shape.kv_heads * 2 * shape.head_dim * EXACT_BYTES

    def sequence_bytes(self, shape: KVShape, tokens: int) -> int:
        """Bytes that one sequence of `tokens` tokens really occupies: whole pages and its exact buffers."""
        pages = -(-tokens // PAGE_TOKENS)
        return self.pool_bytes(shape, pages) + self.exact_bytes(shape, 1)


Scale = Annotated[float, Field(gt=0)]


class KVScales(StrictModel):
    """Static scales by layer (x ~ code * scale); None for a side that has none."""

    key: tuple[Scale, ...] | None
    value: tuple[Scale, ...] | None


FP16_POLICY = KVPolicy(name="fp16", key=Format(dtype="fp16"), value=Format(dtype="fp16"))
"""The baseline of every comparison."""


def live_tokens(policy: KVPolicy, shape: KVShape, budget_bytes: int, sequence_tokens: int) -> int:
    """Most tokens that fit in `budget_bytes` of cache memory when every sequence is `sequence_tokens` long."""
    sequences = budget_bytes // policy.sequence_bytes(shape, sequence_tokens)
    return sequences * sequence_tokens
