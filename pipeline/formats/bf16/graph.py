"""The arithmetic in ONNX's operators."""

from pipeline.formats.bf16.spec import BF16
from pipeline.formats.graph import Exact

GRAPH = Exact(BF16)
