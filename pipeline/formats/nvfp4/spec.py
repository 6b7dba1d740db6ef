"""What a code is: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign.

Byte i holds the codes of channel i, in its lower four bits, and of D / 2 + i. ModelOpt names the format, but its export writes
amax / 448 as the scale of a layer, where its quantizer takes amax / 2688.
"""

from pipeline.formats.spec import E4M3, PACKED, Spec

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes by their lower three bits; the fourth one is the sign."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-9, 448.0
"""Of a block; a block of zeros has the smallest one."""

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
