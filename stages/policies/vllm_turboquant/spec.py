"""Description of the values of vLLM's turboquant_k8v4: codes 0 to 15 from the unrounded range and minimum, rounded half up.

kvgate's own int4 computes its codes from the stored (rounded) scale and zero.
"""

from stages.policies.spec import PACKED, Spec

SMALLEST_SCALE = 1e-8
"""Minimum of the scale that divides the values. The scale is stored as float16, which may round it to 0."""

VLLM_TURBOQUANT = Spec(
    "vllm_turboquant",
    "integer",
    4,
    PACKED,
    7.0,
    arithmetic="vllm_turboquant",
    refines=("int4", False, "none"),
    native=(None, 7),
    vllm_beside={"fp8_e4m3 per_tensor": "turboquant_k8v4"},
)
