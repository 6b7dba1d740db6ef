"""The description of a number format, without its arithmetic. Every command imports this module, so it must load fast.

A scale is a dequantization factor: x ~ code * scale + zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Element:
    """An element type of arrays, with its names in ONNX, NumPy and torch."""

    onnx: str
    numpy: str
    """Name of a NumPy type of the same size; NumPy supports bfloat16 only through ml_dtypes."""
    torch: str
    bytes: int


FLOAT32 = Element("FLOAT", "float32", "float32", 4)
FLOAT16 = Element("FLOAT16", "float16", "float16", 2)
BFLOAT16 = Element("BFLOAT16", "bfloat16", "bfloat16", 2)
E4M3 = Element("FLOAT8E4M3FN", "uint8", "float8_e4m3fn", 1)
E5M2 = Element("FLOAT8E5M2", "uint8", "float8_e5m2", 1)
PACKED = Element("INT8", "int8", "int8", 1)
"""Bytes with n = 8 / bits packed codes. Code j of byte i, counted from the lowest bits, belongs to channel j * D / n + i. The
topmost code of an integer format is signed; the others are stored with an offset of half their range, 2 ** (bits - 1). The type
is int8 because TensorRT does not support uint8."""

ONNX_DOMAIN = "kv"
"""ONNX domain of the attention and quantize functions. A backend with its own kernel overrides a function by (domain, name)."""

GROUP_SIZES = (16, 32, 64, 128)

MIN_SCALE = 2.0**-14
"""Minimum of a stored float16 scale: the smallest normal float16. It keeps an all-zero group from dividing by zero, and the
rounding error of the scale below half a step."""

MAX_FLOAT16 = 65504.0
"""Largest float16. Engines refuse larger keys and values, as they refuse NaN. Larger scales and zero points are saturated."""


@dataclass(frozen=True)
class Spec:
    """A number format.

    `exact` formats have no scale. `float` formats round to nearest even and saturate. `integer` formats pack 8 / bits codes
    into a byte, and may have a zero point in addition to the scale.
    """

    name: str
    kind: Literal["exact", "float", "integer"]
    bits: int
    storage: Element
    limit: float = 0.0
    """Largest magnitude of a symmetric code; symmetric scale = amax / limit."""

    scale_storage: Element = FLOAT16
    zero_storage: Element | None = FLOAT16
    """Type of stored zero points of asymmetric codes; None if bits of the scale hold the zero point."""
    block: int | None = None
    """Channels per block of a format with two scales: each block's stored scale is in units of the layer's static scale. None
    for other formats, including llama.cpp's, whose blocks are described by `dynamic_group`."""
    block_limit: float = 1.0
    """Scale of the block with the largest magnitude in the calibration texts, in units of the layer's scale."""

    arithmetic: str = "kvgate"
    refines: tuple[str, bool, str] = ("", True, "none")
    """For another library's arithmetic: the dtype whose codes it uses, whether they are symmetric, and the rotation."""
    dynamic_group: int | None = None
    """The only group_size of another library's type; such a type is symmetric and has dynamic scales."""
    reference_only: bool = False
    """Whether only the reference engine supports the format."""
    native: tuple[int | None, int | None] = (None, None)
    """Numbers in stages/engines/onnx/native/codes.h for symmetric and asymmetric codes; None if the kernel lacks them."""
    modelopt_name: str | None = None
    """ModelOpt's algorithm name for a cache with one calibrated scale per layer; None if no export of it is correct."""
    vllm: Mapping[str, str] = field(default_factory=dict)
    """Granularity -> vLLM's cache type with identical arithmetic."""
    llamacpp: str | None = None
    vllm_by_key_format: Mapping[str, str] = field(default_factory=dict)
    """For formats of values: format of the keys -> vLLM's cache type for the pair."""
    sglang: str | None = None
    """SGLang's cache type with identical arithmetic at scale 1.0."""

    @property
    def levels(self) -> int:
        """Largest code of an asymmetric integer format, whose codes start at 0; asymmetric scale = (max - min) / levels."""
        return (1 << self.bits) - 1

    @property
    def packed(self) -> int:
        """Codes per byte of storage; 1 if a code takes whole bytes."""
        return max(1, 8 // self.bits)
