"""The arithmetic in ONNX's operators."""

from pipeline.formats.graph import Integer
from pipeline.formats.int8.spec import INT8

GRAPH = Integer(INT8)
