"""llama.cpp's types q8_0 and q4_0: whole numbers in units of the scale of their block.

q4_0 makes the largest magnitude of a block -8, so that its scales have a sign.
"""

from pipeline.formats.spec import PACKED, Spec

BLOCK = 32
"""Channels of a block."""


def _spec(name: str, bits: int, limit: float) -> Spec:
    return Spec(name, "integer", bits, PACKED, limit, oracle_only=True, dynamic_group=BLOCK, llamacpp=name)


TYPES = (_spec("q8_0", 8, 127.0), _spec("q4_0", 4, 8.0))
