"""Descriptions of llama.cpp's types q8_0 and q4_0: integers with a scale per block.

q4_0 maps the largest magnitude of a block to -8, so its scales are signed.
"""

from stages.policies.spec import PACKED, Spec

BLOCK = 32
"""Channels per block."""


def _spec(name: str, bits: int, limit: float) -> Spec:
    return Spec(name, "integer", bits, PACKED, limit, reference_only=True, dynamic_group=BLOCK, llamacpp=name)


TYPES = (_spec("q8_0", 8, 127.0), _spec("q4_0", 4, 8.0))
