"""The arithmetic in ONNX's operators."""

from pipeline.formats.fp8_e4m3.spec import FP8_E4M3
from pipeline.formats.graph import Float

GRAPH = Float(FP8_E4M3)
