"""How a checkpoint's weights are quantized; the cache's formats are in `pipeline.core.kv`."""

from typing import Literal

WeightsFormat = Literal["none", "fp8", "int8_sq", "int4_awq"]
"""none: untouched; fp8: E4M3 weights and inputs; int8_sq: INT8 SmoothQuant, both too; int4_awq: INT4 weights, AWQ."""
