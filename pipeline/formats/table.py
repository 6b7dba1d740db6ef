"""Every number format by the name that a configuration gives it. Formats with the arithmetic of their kind are written here,
the others in their folders."""

from pipeline.formats.ggml.spec import TYPES as GGML
from pipeline.formats.nvfp4.spec import NVFP4
from pipeline.formats.spec import BFLOAT16, E4M3, E5M2, FLOAT16, PACKED, Spec
from pipeline.formats.vllm_token_head.spec import VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_FP8, VLLM_TOKEN_HEAD_INT8
from pipeline.formats.vllm_turboquant.spec import VLLM_TURBOQUANT

FP16 = Spec("fp16", "exact", 16, FLOAT16, native=(0, None), llamacpp="f16")
"""The type of the baseline's cache."""
BF16 = Spec("bf16", "exact", 16, BFLOAT16, native=(1, None))
"""float32's range, 8 bits of precision."""
FP8_E4M3 = Spec(
    "fp8_e4m3",
    "float",
    8,
    E4M3,
    448.0,
    neighbour="fp8_e5m2",
    native=(2, None),
    modelopt_bits=(4, 3),
    modelopt_name="FP8",
    vllm={"per_tensor": "fp8_e4m3", "per_head": "fp8_e4m3"},
    sglang="fp8_e4m3",
)
"""4 bits of exponent and 3 of mantissa, without infinities."""
FP8_E5M2 = Spec(
    "fp8_e5m2",
    "float",
    8,
    E5M2,
    57344.0,
    neighbour="fp8_e4m3",
    native=(3, None),
    vllm={"per_tensor": "fp8_e5m2"},
    sglang="fp8_e5m2",
)
"""5 bits of exponent and 2 of mantissa. ModelOpt refuses it."""
INT8 = Spec("int8", "integer", 8, PACKED, 127.0, native=(4, 5), modelopt_bits=8, modelopt_name="INT8")
"""-127 to 127, or 0 to 255 from a zero."""
INT4 = Spec("int4", "integer", 4, PACKED, 7.0, native=(6, 7), modelopt_bits=4)
"""-7 to 7, or 0 to 15 from a zero; two to a byte."""

CODES: dict[str, Spec] = {spec.name: spec for spec in (FP16, BF16, FP8_E4M3, FP8_E5M2, INT8, INT4, NVFP4, *GGML)}
"""By kv.*.dtype."""

REFINED = (VLLM_TURBOQUANT, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_INT8, VLLM_TOKEN_HEAD_FP8)
ARITHMETICS: dict[tuple[str, str], Spec] = {(spec.arithmetic, spec.refines[0]): spec for spec in REFINED}
"""By kv.*.arithmetic and kv.*.dtype: formats that refine a dtype."""
