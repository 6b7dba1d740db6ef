"""What a number format is, without its arithmetic. Light: every command imports it.

A scale is a dequantization factor: x ~ code * scale + zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Element:
    """The type of an array's elements, by its name in each library."""

    onnx: str
    numpy: str
    """Of the same bytes; numpy knows bfloat16 by ml_dtypes."""
    torch: str
    bytes: int


FLOAT32 = Element("FLOAT", "float32", "float32", 4)
FLOAT16 = Element("FLOAT16", "float16", "float16", 2)
BFLOAT16 = Element("BFLOAT16", "bfloat16", "bfloat16", 2)
E4M3 = Element("FLOAT8E4M3FN", "uint8", "float8_e4m3fn", 1)
E5M2 = Element("FLOAT8E5M2", "uint8", "float8_e5m2", 1)
PACKED = Element("INT8", "int8", "int8", 1)
"""n = 8 / bits codes in a byte: number j of byte i, from the lowest bits up, is the code of channel j * D / n + i. The topmost
number of integer codes is signed; the others are stored plus half their range, 2 ** (bits - 1). The type is int8 because
TensorRT takes no uint8."""

GROUP_SIZES = (16, 32, 64, 128)

MIN_SCALE = 2.0**-14
"""Floor of a stored float16 scale: the smallest normal one, so that an all-zero group divides by something and the rounding of
the scale itself stays below half a step."""

MAX_FLOAT16 = 65504.0
"""Engines refuse keys and values beyond it like NaN, and saturate scales and zeros there."""


@dataclass(frozen=True)
class Spec:
    """A number format.

    `exact` types are not scaled; `float` types round to nearest even and saturate; `integer` types are packed 8 / bits to a
    byte, and may have a zero beside the scale.
    """

    name: str
    kind: Literal["exact", "float", "integer"]
    bits: int
    storage: Element
    limit: float = 0.0
    """Largest magnitude of a symmetric code; symmetric scale = amax / limit."""

    scale_storage: Element = FLOAT16
    """Of stored scales."""
    zero_storage: Element | None = FLOAT16
    """Of the zeros beside asymmetric codes' stored scales; None where a stored scale holds its zero in bits."""
    block: int | None = None
    """Channels of a block, whose stored scale is in units of a static scale of the layer; None without blocks."""
    block_limit: float = 1.0
    """Scale of the block that holds the largest magnitude of calibration, in units of the layer's scale."""

    arithmetic: str = "kvgate"
    """Whose rounding it is."""
    refines: tuple[str, bool, str] = ("", True, "none")
    """Of an arithmetic that another library has for the codes of a dtype: that dtype, whether its codes are symmetric, and the
    rotation that goes with it."""
    dynamic_group: int | None = None
    """The one group_size of a type that another library defines; such a type is symmetric, and its scales are dynamic."""
    oracle_only: bool = False
    """Whether the oracle alone computes it."""
    neighbour: str | None = None
    """The format of as many bits that an engine may take it for."""

    native: tuple[int | None, int | None] = (None, None)
    """Numbers in stages/engines/onnx/native/codes.h, of symmetric and of asymmetric codes; None where its kernel has none."""
    modelopt_bits: int | tuple[int, int] | None = None
    """ModelOpt's num_bits where its own arithmetic is this one: bits, or bits of exponent and mantissa."""
    modelopt_name: str | None = None
    """ModelOpt's algorithm of a cache with calibrated scales a layer."""
    modelopt_export: bool = True
    """Whether the exports of that name are right."""
    vllm: Mapping[str, str] = field(default_factory=dict)
    """Granularity -> the type of vLLM's cache that means the same arithmetic."""
    llamacpp: str | None = None
    """The type of llama.cpp's cache."""
    vllm_beside: Mapping[str, str] = field(default_factory=dict)
    """Of values: the format of the keys beside them -> the type of vLLM's cache that has both."""
    sglang: str | None = None
    """The type of SGLang's cache that means the same arithmetic at scale 1.0."""

    @property
    def levels(self) -> int:
        """Codes of an asymmetric integer format are 0 to levels; asymmetric scale = (max - min) / levels."""
        return (1 << self.bits) - 1

    @property
    def packed(self) -> int:
        """Codes in a byte of storage; 1 where a code has bytes of its own."""
        return max(1, 8 // self.bits)
