"""All number formats by their names in a configuration. Formats with their own arithmetic are defined in their folders."""

from stages.policies.ggml.spec import TYPES as GGML
from stages.policies.nvfp4.spec import NVFP4
from stages.policies.spec import BFLOAT16, E4M3, E5M2, FLOAT16, PACKED, Spec
from stages.policies.vllm_token_head.spec import VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_FP8, VLLM_TOKEN_HEAD_INT8
from stages.policies.vllm_turboquant.spec import VLLM_TURBOQUANT

FP16 = Spec("fp16", "exact", 16, FLOAT16, native=(0, None), llamacpp="f16")
"""Format of the baseline's cache."""
BF16 = Spec("bf16", "exact", 16, BFLOAT16, native=(1, None))
"""The range of float32 with 8 bits of precision."""
FP8_E4M3 = Spec(
    "fp8_e4m3",
    "float",
    8,
    E4M3,
    448.0,
    native=(2, None),
    modelopt_bits=(4, 3),
    modelopt_name="FP8",
    vllm={"per_tensor": "fp8_e4m3", "per_head": "fp8_e4m3"},
    sglang="fp8_e4m3",
)
"""4 exponent bits, 3 mantissa bits, no infinities."""
FP8_E5M2 = Spec(
    "fp8_e5m2",
    "float",
    8,
    E5M2,
    57344.0,
    native=(3, None),
    vllm={"per_tensor": "fp8_e5m2"},
    sglang="fp8_e5m2",
)
"""5 exponent bits, 2 mantissa bits. ModelOpt refuses it."""
INT8 = Spec("int8", "integer", 8, PACKED, 127.0, native=(4, 5), modelopt_bits=8, modelopt_name="INT8")
"""-127 to 127, or 0 to 255 with a zero point."""
INT4 = Spec("int4", "integer", 4, PACKED, 7.0, native=(6, 7), modelopt_bits=4)
"""-7 to 7, or 0 to 15 with a zero point; two codes per byte."""

CODES: dict[str, Spec] = {spec.name: spec for spec in (FP16, BF16, FP8_E4M3, FP8_E5M2, INT8, INT4, NVFP4, *GGML)}
"""kv.*.dtype -> format."""

REFINED = (VLLM_TURBOQUANT, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_INT8, VLLM_TOKEN_HEAD_FP8)
ARITHMETICS: dict[tuple[str, str], Spec] = {(spec.arithmetic, spec.refines[0]): spec for spec in REFINED}
"""(kv.*.arithmetic, kv.*.dtype) -> format with another library's arithmetic."""
