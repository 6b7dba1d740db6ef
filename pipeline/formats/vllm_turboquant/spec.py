"""What a code is: 0 to 15 of the unrounded range and minimum, rounded half up, where int4's are of the stored ones."""

from pipeline.formats.spec import PACKED, Spec

SMALLEST_SCALE = 1e-8
"""Floor of the scale that values are divided by; it is stored as a float16, which may be 0."""

VLLM_TURBOQUANT = Spec("vllm_turboquant", "integer", 4, PACKED, 7.0, refines=("int4", "none"), native=(None, 7))
