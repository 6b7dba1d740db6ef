"""Formats of a checkpoint's weights; those of the cache are in `pipeline.core.formats`."""

from typing import Literal

WeightsFormat = Literal["none", "fp8", "int8_sq", "int4_awq"]
"""none: untouched; fp8: E4M3 weights and inputs; int8_sq: INT8 SmoothQuant, both too; int4_awq: INT4 weights, AWQ."""
