"""The arithmetic in torch."""

from pipeline.formats.int4.spec import INT4
from pipeline.formats.oracle import Integer

ORACLE = Integer(INT4)
