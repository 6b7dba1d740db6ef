"""NVFP4's description. A code is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign.

Byte i holds the code of channel i in its lower four bits and the code of channel D / 2 + i in its upper four bits. ModelOpt
names the format, but its export writes amax / 448 as the layer's scale, whereas its quantizer uses amax / 2688.
"""

from stages.policies.spec import E4M3, PACKED, Spec

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth bit is the sign."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-9, 448.0
"""Range of a block's scale; a block of zeros has the smallest scale."""

NVFP4 = Spec(
    "nvfp4",
    "float",
    4,
    PACKED,
    6.0,
    scale_storage=E4M3,
    block=16,
    block_limit=LARGEST_SCALE,
    native=(8, None),
    modelopt_name="NVFP4",
    modelopt_export=False,
    vllm={"per_group": "nvfp4"},
)
