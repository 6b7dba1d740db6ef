"""Cache formats: the code type, the granularity and source of scales, and the stored bytes.

The modules arithmetic_torch.py and arithmetic_onnx.py, here and in the folders of single formats, implement the arithmetic.

Legend: D = head_dim, H = num_kv_heads. A scale is a dequantization factor: x ~ code * scale + zero.
"""

from typing import Literal, Self, get_args

from pydantic import model_validator

from stages.core.strict import StrictModel
from stages.policies.spec import GROUP_SIZES, Spec
from stages.policies.table import ARITHMETICS, CODES

Granularity = Literal["none", "per_tensor", "per_head", "per_channel", "per_token", "per_group"]
ScaleSource = Literal["none", "uncalibrated", "calibrated", "dynamic"]
Rotation = Literal["none", "hadamard", "hadamard_64", "signed_hadamard"]
Arithmetic = Literal["kvgate", "vllm_turboquant", "vllm_token_head"]


class Format(StrictModel):
    """The stored form of one side of the cache (keys or values).

    granularity: the numbers that share a scale. Static scales are fixed at build time: `per_tensor` has one scale per layer,
    `per_head` one per KV head, `per_channel` one per KV head and channel. Dynamic scales are stored with the codes as float16:
    `per_token` has one scale per token and KV head, `per_group` one per token, KV head and `group_size` channels.
    scale: the source of the scales. `calibrated` scales are measured by ModelOpt, `uncalibrated` scales are 1.0, and `dynamic`
    scales are computed from the new tokens when they are written.
    symmetric: false stores a zero point with every scale. The zero point is the value of code 0, the smallest number of its
    group.
    rotation: `hadamard` multiplies every head's vector by the orthonormal Hadamard matrix before quantization, which spreads
    outlier channels. Queries are rotated too and outputs are rotated back, so that the attention is unchanged.

    dtype=nvfp4 has two scales: x ~ code * block scale * layer scale. Codes are E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign).
    Every 16 channels of a token and KV head share a dynamic E4M3 block scale, which is stored with the codes. The layer scale
    is a calibrated float32 per layer and side. The largest magnitude of a block becomes 6.

    dtype=q8_0 and dtype=q4_0 are llama.cpp's types: blocks of 32 channels, with llama.cpp's rounding and byte layout. Only
    these types support rotation=hadamard_64, which rotates every 64 channels, as llama.cpp rotates values.

    arithmetic: the library whose rounding the format reproduces. Two arithmetics are vLLM's, with a scale per token and head,
    so that an engine here computes the same numbers as vLLM. `vllm_turboquant` reproduces the values of turboquant_k8v4: INT4
    codes computed from the unrounded range and minimum, rounded half up (kvgate's own codes use the stored, rounded ones).
    `vllm_token_head` reproduces int8_per_token_head and fp8_per_token_head, with float32 scales, and int4_per_token_head, with
    rotation=signed_hadamard (vLLM's random signs, then the Hadamard matrix of -1 and 1). The zero point of the INT4 type is a
    whole number of codes, stored in the four lowest bits of the float32 scale.
    """

    dtype: str
    """Type of the codes: fp16, bf16, fp8_e4m3, fp8_e5m2, int8, int4, nvfp4, or llama.cpp's q8_0 and q4_0."""
    granularity: Granularity = "none"
    """Numbers that share a scale: a layer, a KV head, a channel, a token of a head, or a group of channels of a token."""
    group_size: int | None = None
    """Channels per group: 16, 32, 64 or 128; null unless granularity is per_group."""
    symmetric: bool = True
    """Whether code 0 means 0; false stores a zero point with every scale."""
    scale: ScaleSource = "none"
    """Source of the scales: ModelOpt's calibration, the constant 1.0 (uncalibrated), or the token itself (dynamic)."""
    rotation: Rotation = "none"
    """Rotation of every head before quantization; hadamard_64 is for llama.cpp's types, signed_hadamard for vLLM's."""
    arithmetic: Arithmetic = "kvgate"
    """Library whose rounding is reproduced."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        dtypes = tuple(dtype for arithmetic, dtype in ARITHMETICS if arithmetic == self.arithmetic) or tuple(CODES)
        if self.dtype not in dtypes:
            raise ValueError(f"dtype must be {either(dtypes)} with arithmetic={self.arithmetic}, got {self.dtype}")
        for key, values in self._allowed().items():
            value = getattr(self, key)
            if value not in values:
                raise ValueError(
                    f"{key} must be {either(values)}, got {_text(value)}, with dtype={self.dtype} "
                    f"granularity={self.granularity} arithmetic={self.arithmetic}"
                )
        return self

    def _allowed(self) -> dict[str, tuple[object, ...]]:
        """Return the allowed values of each key, given the dtype, the arithmetic and the granularity."""
        code = self.code
        if self.exact or self.arithmetic != "kvgate":
            _, symmetric, rotation = code.refines  # symmetric and unrotated, if exact
            granularity, scale = ("none", "none") if self.exact else ("per_token", "dynamic")
            only = {
                "granularity": granularity,
                "group_size": None,
                "symmetric": symmetric,
                "scale": scale,
                "rotation": rotation,
            }
            return {key: (value,) for key, value in only.items()}
        size = code.block or code.dynamic_group
        floating = code.kind == "float"
        sources = ("calibrated",) if self.has_static_scales else ("dynamic",)
        return {
            "granularity": ("per_group",) if size else get_args(Granularity)[1:],
            "group_size": (None,) if self.granularity != "per_group" else (size,) if size else GROUP_SIZES,
            "symmetric": (True,) if floating or code.dynamic_group else (True, False),
            "scale": ("calibrated", "uncalibrated") if self.granularity == "per_tensor" and floating else sources,
            "rotation": ("none", "hadamard", *(["hadamard_64"] if code.llamacpp else [])),
        }

    @property
    def code(self) -> Spec:
        return CODES[self.dtype] if self.arithmetic == "kvgate" else ARITHMETICS[self.arithmetic, self.dtype]

    @property
    def exact(self) -> bool:
        """Whether the numbers are stored without scales: fp16 or bf16."""
        return self.code.kind == "exact"

    @property
    def static(self) -> bool:
        """Whether all scales are fixed at build time and stored once, not per token."""
        return self.granularity in ("per_tensor", "per_head", "per_channel")

    @property
    def static_granularity(self) -> Granularity | None:
        """Granularity of the static scales: per_tensor for formats with blocks (their layer scale); None for dynamic scales."""
        if self.code.block is not None:
            return "per_tensor"
        return self.granularity if self.static else None

    @property
    def has_static_scales(self) -> bool:
        return self.static_granularity is not None

    @property
    def largest(self) -> float:
        """The largest magnitude in units of a symmetric static scale: scale = amax / largest."""
        return self.code.limit * self.code.block_limit

    def static_scales(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of static scales per layer: 1, H or H * D; 0 if the scales are dynamic."""
        counts = {"per_tensor": 1, "per_head": kv_heads, "per_channel": kv_heads * head_dim}
        return counts[self.static_granularity] if self.static_granularity else 0

    def scales_per_token(self, head_dim: int) -> int:
        """Return the stored scales per token and KV head: 0 if static or exact, 1 per token, D / group_size per group."""
        if self.granularity == "per_group":
            assert self.group_size is not None
            return head_dim // self.group_size
        return 1 if self.granularity == "per_token" else 0

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.code.bits // 8

    def token_bytes(self, head_dim: int) -> int:
        """Return the bytes per token and KV head, including scales and zero points."""
        zero = None if self.symmetric else self.code.zero_storage
        parameter_bytes = self.code.scale_storage.bytes + (0 if zero is None else zero.bytes)
        return self.code_bytes(head_dim) + parameter_bytes * self.scales_per_token(head_dim)

    def refuse_head_dim(self, head_dim: int) -> str | None:
        """Return why this format does not support heads of `head_dim` channels: field, problem, fix; None if it does."""
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


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def either(values: tuple[object, ...]) -> str:
    """Return the values as a list in words: a, b or c."""
    *first, last = map(_text, values)
    return f"{', '.join(first)} or {last}" if first else last


WeightsFormat = Literal["none", "fp8", "int8_sq", "int4_awq"]
"""Formats of a checkpoint's weights. none: unchanged; fp8: E4M3 weights and inputs; int8_sq: INT8 weights and inputs with
SmoothQuant; int4_awq: INT4 weights with AWQ."""
