"""What a code is. Of values: 0 to 15 of the unrounded range and minimum, rounded half up, where int4's are of the stored ones.

Of keys: the number of one of 16 centroids, and the norm of the vector as its scale. ONNX's operators have no graph of them.
"""

from pipeline.formats.spec import PACKED, Spec

SMALLEST_SCALE = 1e-8
"""Floor of the scale that values are divided by; it is stored as a float16, which may be 0."""

VLLM_TURBOQUANT = Spec(
    "vllm_turboquant",
    "integer",
    4,
    PACKED,
    7.0,
    arithmetic="vllm_turboquant",
    refines=("int4", False, "none"),
    native=(None, 7),
    vllm_beside={
        "fp8_e4m3 per_tensor": "turboquant_k8v4",
        "int4 per_token rotation=hadamard arithmetic=vllm_centroids": "turboquant_4bit_nc",
    },
)
VLLM_CENTROIDS = Spec(
    "vllm_centroids",
    "integer",
    4,
    PACKED,
    7.0,
    arithmetic="vllm_centroids",
    refines=("int4", True, "hadamard"),
    oracle_only=True,
)
