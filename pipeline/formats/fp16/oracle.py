"""The arithmetic in torch."""

from pipeline.formats.fp16.spec import FP16
from pipeline.formats.oracle import Exact

ORACLE = Exact(FP16)
