"""The arithmetic in torch."""

from pipeline.formats.fp8_e4m3.spec import FP8_E4M3
from pipeline.formats.oracle import Float

ORACLE = Float(FP8_E4M3)
