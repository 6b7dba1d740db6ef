"""What a code is. Of values: 0 to 15 or 7 of the unrounded range and minimum, rounded half up, where int4's are of stored ones.

Of keys: the number of one of 16 or 8 centroids, and the norm of the vector as its scale. Of keys and of 3 bits there is no
graph. Three bits are a dtype of these arithmetics alone.
"""

from dataclasses import replace

from pipeline.formats.spec import PACKED, Spec

SMALLEST_SCALE = 1e-8
"""Floor of the scale that values are divided by; it is stored as a float16, which may be 0."""
KEYS = "int{} per_token rotation=hadamard arithmetic=vllm_centroids"

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
        KEYS.format(4): "turboquant_4bit_nc",
        KEYS.format(3): "turboquant_k3v4_nc",
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
VLLM_TURBOQUANT_3 = replace(
    VLLM_TURBOQUANT,
    name="vllm_turboquant_3",
    bits=3,
    limit=3.0,
    refines=("int3", False, "none"),
    native=(None, None),
    oracle_only=True,
    vllm_beside={KEYS.format(3): "turboquant_3bit_nc"},
)
VLLM_CENTROIDS_3 = replace(VLLM_CENTROIDS, name="vllm_centroids_3", bits=3, limit=3.0, refines=("int3", True, "hadamard"))
TYPES = (VLLM_TURBOQUANT, VLLM_CENTROIDS, VLLM_TURBOQUANT_3, VLLM_CENTROIDS_3)
