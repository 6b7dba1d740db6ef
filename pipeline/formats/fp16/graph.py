"""The arithmetic in ONNX's operators."""

from pipeline.formats.fp16.spec import FP16
from pipeline.formats.graph import Exact

GRAPH = Exact(FP16)
