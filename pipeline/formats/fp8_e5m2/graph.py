"""The arithmetic in ONNX's operators."""

from pipeline.formats.fp8_e5m2.spec import FP8_E5M2
from pipeline.formats.graph import Float

GRAPH = Float(FP8_E5M2)
