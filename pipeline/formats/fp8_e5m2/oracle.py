"""The arithmetic in torch."""

from pipeline.formats.fp8_e5m2.spec import FP8_E5M2
from pipeline.formats.oracle import Float

ORACLE = Float(FP8_E5M2)
