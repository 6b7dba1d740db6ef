"""The arithmetic in torch."""

from pipeline.formats.bf16.spec import BF16
from pipeline.formats.oracle import Exact

ORACLE = Exact(BF16)
