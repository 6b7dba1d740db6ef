"""The arithmetic in ONNX's operators."""

from pipeline.formats.graph import Integer
from pipeline.formats.int4.spec import INT4

GRAPH = Integer(INT4)
