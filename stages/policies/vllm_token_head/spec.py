"""Descriptions of vLLM's token-and-head formats: INT8 or E4M3 codes with a float32 scale, or INT4 codes with a zero point.

The zero point is a whole number of codes in the four lowest bits of the scale. ONNX operators cannot read these bits, so this
folder has no arithmetic_onnx.py.
"""

from stages.policies.spec import E4M3, FLOAT32, PACKED, Spec

SMALLEST_SCALE = 1e-6

VLLM_TOKEN_HEAD = Spec(
    "vllm_token_head",
    "integer",
    4,
    PACKED,
    7.0,
    scale_storage=FLOAT32,
    zero_storage=None,
    arithmetic="vllm_token_head",
    refines=("int4", False, "signed_hadamard"),
    reference_only=True,
    vllm={"per_token": "int4_per_token_head"},
)
VLLM_TOKEN_HEAD_INT8 = Spec(
    "vllm_token_head_int8",
    "integer",
    8,
    PACKED,
    127.0,
    scale_storage=FLOAT32,
    arithmetic="vllm_token_head",
    refines=("int8", True, "none"),
    reference_only=True,
    vllm={"per_token": "int8_per_token_head"},
)
VLLM_TOKEN_HEAD_FP8 = Spec(
    "vllm_token_head_fp8",
    "float",
    8,
    E4M3,
    448.0,
    scale_storage=FLOAT32,
    arithmetic="vllm_token_head",
    refines=("fp8_e4m3", True, "none"),
    reference_only=True,
    vllm={"per_token": "fp8_per_token_head"},
)
