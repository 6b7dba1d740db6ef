"""What a code is, by the type's name in llama.cpp: a whole number, or with iq4_nl one of a table's.

q4_0 and iq4_nl make the largest magnitude of a block -8 or -127, so that their scales have a sign. q4_1 and q5_1 store a
block's minimum beside its scale.
"""

from pipeline.formats.spec import PACKED, Spec

BLOCK = 32
"""Channels of a block."""
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of iq4_nl stand for."""


def _spec(name: str, bits: int, limit: float, *, symmetric: bool = True) -> Spec:
    return Spec(name, "integer", bits, PACKED, limit, oracle_only=True, only=(BLOCK, symmetric), llamacpp=name)


TYPES = (
    _spec("q8_0", 8, 127.0),
    _spec("q5_1", 5, 15.0, symmetric=False),
    _spec("q4_1", 4, 7.0, symmetric=False),
    _spec("q4_0", 4, 8.0),
    _spec("iq4_nl", 4, 127.0),
)
