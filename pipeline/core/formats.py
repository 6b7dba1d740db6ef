"""Cache formats: which numbers are stored, what shares a scale, where the scale comes from, and the bytes of all that.

pipeline/formats has the numbers themselves.

Legend: D = head_dim, H = num_kv_heads. A scale is a dequantization factor: x ~ code * scale + zero.
"""

from typing import Literal, Self

from pydantic import model_validator

from pipeline.core.strict import StrictModel
from pipeline.formats.spec import GROUP_SIZES, Spec
from pipeline.formats.table import ARITHMETICS, CODES

Granularity = Literal["none", "per_tensor", "per_head", "per_channel", "per_token", "per_group"]
ScaleSource = Literal["none", "uncalibrated", "calibrated", "dynamic"]
Rotation = Literal["none", "hadamard", "hadamard_64", "signed_hadamard"]
Arithmetic = Literal["kvgate", "vllm_turboquant", "vllm_token_head"]


class Format(StrictModel):
    """The stored form of one side of the cache (keys or values).

    granularity says what shares a scale: `per_tensor` one per layer, `per_head` one per KV head, `per_channel` one per KV
    head and channel (all static, fixed at build time); `per_token` one per token and KV head, `per_group` one per token,
    KV head and `group_size` channels (both dynamic, stored beside the codes as float16).
    scale says where it comes from: `calibrated` by ModelOpt, `uncalibrated` is 1.0, `dynamic` is computed from the tokens that
    share it when they are written.
    symmetric=false stores a zero beside every scale: the value of code 0, the smallest of what shares it.
    rotation=hadamard multiplies every head's vector by the orthonormal Hadamard matrix before anything else, which spreads
    outlier channels; queries are rotated alike and outputs rotated back, so that the attention is unchanged.

    dtype=nvfp4 has two scales: x ~ code * block scale * layer scale. Codes are E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign).
    Each 16 channels of a token and KV head have an E4M3 scale, dynamic and stored beside the codes; it is in units of one
    float32 scale of the layer and side, which is calibrated. The block's largest magnitude becomes 6.

    dtype=q8_0 and q4_0 are llama.cpp's types: blocks of 32 channels, in its rounding and bytes. Only they take
    rotation=hadamard_64, the Hadamard matrix of each 64 channels, as llama.cpp rotates values.

    arithmetic names the library whose rounding codes, scales and zeros have. Two are vLLM's, with a scale per token and head,
    so that an engine here computes what vLLM computes. `vllm_turboquant`: values of turboquant_k8v4, INT4 codes of the
    unrounded range and minimum, rounded half up; kvgate's own are of the stored ones. `vllm_token_head`: int8_per_token_head
    and fp8_per_token_head, whose scales are float32; and int4_per_token_head: rotation=signed_hadamard (vLLM's own signs, then
    the Hadamard matrix of -1 and 1), a zero that is a whole number of codes, and one float32 for both, the zero in the four
    lowest bits of the scale.
    """

    dtype: str
    """Type of a code: fp16, bf16, fp8_e4m3, fp8_e5m2, int8, int4, nvfp4; llama.cpp's q8_0 and q4_0."""
    granularity: Granularity = "none"
    """What shares a scale: a layer, a KV head, a channel, a token of a head, or a group of channels of a token."""
    group_size: int | None = None
    """Channels of a group: 16, 32, 64 or 128; null unless granularity is per_group."""
    symmetric: bool = True
    """Whether code 0 is 0; false stores a zero beside each scale."""
    scale: ScaleSource = "none"
    """Where the scale comes from: ModelOpt's calibration, 1.0 (uncalibrated), or the token itself (dynamic)."""
    rotation: Rotation = "none"
    """Exact rotation of every head before quantization; hadamard_64 is of llama.cpp's types, signed_hadamard of vLLM's."""
    arithmetic: Arithmetic = "kvgate"
    """Whose rounding a scale per token and head has."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.arithmetic == "kvgate" and self.dtype not in CODES:
            raise ValueError(f"dtype must be one of {', '.join(CODES)}, got {self.dtype}")
        if self.arithmetic != "kvgate" or self.rotation == "signed_hadamard":
            self._check_vllm()
        block = self.code.block
        if block is not None and (self.granularity, self.group_size) != ("per_group", block):
            raise ValueError(
                f"granularity must be per_group and group_size {block} for dtype {self.dtype}, got {self.granularity} and "
                f"{self.group_size}"
            )
        self._check_llamacpp()
        if self.exact:
            unscaled = (self.granularity, self.scale, self.group_size, self.symmetric) == ("none", "none", None, True)
            if not unscaled or self.rotation != "none":
                raise ValueError(
                    f"dtype {self.dtype} has no scale: set granularity=none, scale=none, group_size=null, symmetric=true "
                    "and rotation=none"
                )
            return self
        if self.granularity == "none":
            raise ValueError(f"granularity must not be none for dtype {self.dtype}: per_tensor, per_token or per_group, say")
        if not self.symmetric and self.code.kind == "float":
            raise ValueError(f"symmetric must be true for {self.dtype}: floating-point codes have no zero point")
        allowed: tuple[ScaleSource, ...] = ("calibrated",) if self.has_static_scales else ("dynamic",)
        if self.granularity == "per_tensor" and self.code.kind == "float":
            allowed = ("calibrated", "uncalibrated")
        if self.scale not in allowed:
            raise ValueError(f"scale must be {' or '.join(allowed)} for {self.dtype} {self.granularity}, got {self.scale}")
        if self.granularity == "per_group" and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES[:-1]))
            raise ValueError(f"group_size must be {sizes} or {GROUP_SIZES[-1]}, got {self.group_size}")
        if self.granularity != "per_group" and self.group_size is not None:
            raise ValueError(f"group_size must be null for granularity {self.granularity}, got {self.group_size}")
        return self

    def _check_llamacpp(self) -> None:
        size = self.code.dynamic_group
        if size is not None and (self.granularity, self.group_size, self.symmetric) != ("per_group", size, True):
            raise ValueError(
                f"dtype {self.dtype} is of granularity=per_group group_size={size} symmetric=true alone: set these"
            )
        if self.rotation == "hadamard_64" and self.code.llamacpp is None:
            raise ValueError(
                f"rotation hadamard_64 is of llama.cpp's types alone, got dtype {self.dtype}: set hadamard or none"
            )

    def _check_vllm(self) -> None:
        if self.arithmetic == "kvgate":
            raise ValueError("rotation must be none or hadamard unless arithmetic is vllm_token_head, got signed_hadamard")
        known = [spec.refines for (name, _), spec in ARITHMETICS.items() if name == self.arithmetic]
        dtype, symmetric, rotation = next((one for one in known if one[0] == self.dtype), known[0])
        given = (self.dtype, self.granularity, self.symmetric, self.scale, self.rotation)
        if given != (dtype, "per_token", symmetric, "dynamic", rotation):
            raise ValueError(
                f"arithmetic {self.arithmetic} is of dtype={dtype} granularity=per_token symmetric={str(symmetric).lower()} "
                f"scale=dynamic rotation={rotation} alone: set these, or arithmetic=kvgate"
            )

    @property
    def code(self) -> Spec:
        return CODES[self.dtype] if self.arithmetic == "kvgate" else ARITHMETICS[self.arithmetic, self.dtype]

    @property
    def exact(self) -> bool:
        """Whether nothing is scaled: fp16 or bf16."""
        return self.code.kind == "exact"

    @property
    def static(self) -> bool:
        """Whether all scales are fixed at build time (and stored once, not per token)."""
        return self.granularity in ("per_tensor", "per_head", "per_channel")

    @property
    def static_granularity(self) -> Granularity | None:
        """What shares a scale that is fixed at build time: with blocks the layer, whose scale theirs are in units of."""
        if self.code.block is not None:
            return "per_tensor"
        return self.granularity if self.static else None

    @property
    def has_static_scales(self) -> bool:
        return self.static_granularity is not None

    @property
    def largest(self) -> float:
        """The largest magnitude in units of a symmetric static scale, which is amax over this."""
        return self.code.limit * self.code.block_limit

    def static_scales(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of a layer's scales that are fixed at build time: 1, H or H * D; 0 when they are dynamic."""
        counts = {"per_tensor": 1, "per_head": kv_heads, "per_channel": kv_heads * head_dim}
        return counts[self.static_granularity] if self.static_granularity else 0

    def scales_per_token(self, head_dim: int) -> int:
        """Return the stored scales of one token of one KV head: 0 if static or exact, 1 per token, D / group_size per group."""
        if self.granularity == "per_group":
            assert self.group_size is not None
            return head_dim // self.group_size
        return 1 if self.granularity == "per_token" else 0

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.code.bits // 8

    def token_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token of one KV head, its scales and zeros included."""
        return self.code_bytes(head_dim) + self.parameter_bytes * self.scales_per_token(head_dim)

    @property
    def parameter_bytes(self) -> int:
        zero = None if self.symmetric else self.code.zero_storage
        return self.code.scale_storage.bytes + (0 if zero is None else zero.bytes)

    def refuse_head_dim(self, head_dim: int) -> str | None:
        """Return why this format cannot hold heads of `head_dim` channels, None when it can.

        The reason begins with the key below the format, and says what to choose.
        """
        if self.group_size is not None and head_dim % self.group_size:
            choice = "choose one that does, or granularity=per_token"
            return f"group_size={self.group_size} does not divide the model's head_dim {head_dim}; {choice}"
        if self.rotation == "hadamard_64" and head_dim % 64:
            return (
                f"rotation=hadamard_64 needs a head_dim that is a multiple of 64, the model has {head_dim}; set rotation=none"
            )
        if self.rotation == "hadamard" and head_dim & (head_dim - 1):
            return f"rotation=hadamard needs a head_dim that is a power of two, the model has {head_dim}; set rotation=none"
        return None


WeightsFormat = Literal["none", "fp8", "int8_sq", "int4_awq"]
"""Of a checkpoint's weights. none: untouched; fp8: E4M3 weights and inputs; int8_sq: INT8 SmoothQuant, both too; int4_awq: INT4
weights, AWQ."""
