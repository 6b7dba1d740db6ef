"""The arithmetic in torch."""

from pipeline.formats.int8.spec import INT8
from pipeline.formats.oracle import Integer

ORACLE = Integer(INT8)
