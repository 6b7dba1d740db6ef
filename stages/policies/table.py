"""All number formats by their names in a configuration, and the constants of formats whose arithmetic has its own folder."""

from typing import Literal

from stages.policies.spec import BFLOAT16, E4M3, E5M2, FLOAT16, FLOAT32, PACKED, Element, Spec

FP16 = Spec("fp16", "exact", 16, FLOAT16, native=(0, None), llamacpp="f16")
BF16 = Spec("bf16", "exact", 16, BFLOAT16, native=(1, None))
"""The range of float32 with 8 bits of precision."""
FP8_E4M3 = Spec(
    "fp8_e4m3",
    "float",
    8,
    E4M3,
    448.0,
    native=(2, None),
    modelopt_name="FP8",
    vllm={"per_tensor": "fp8_e4m3", "per_head": "fp8_e4m3"},
    sglang="fp8_e4m3",
)
"""4 exponent bits, 3 mantissa bits, no infinities."""
FP8_E5M2 = Spec("fp8_e5m2", "float", 8, E5M2, 57344.0, native=(3, None), vllm={"per_tensor": "fp8_e5m2"}, sglang="fp8_e5m2")
"""5 exponent bits, 2 mantissa bits. ModelOpt refuses it."""
INT8 = Spec("int8", "integer", 8, PACKED, 127.0, native=(4, 5), modelopt_name="INT8")
"""-127 to 127, or 0 to 255 with a zero point."""
INT4 = Spec("int4", "integer", 4, PACKED, 7.0, native=(6, 7))
"""-7 to 7, or 0 to 15 with a zero point; two codes per byte."""


NVFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth bit is the sign."""
NVFP4_SCALES = 2.0**-9, 448.0
"""Smallest and largest scale of a block; a block of zeros has the smallest scale."""
NVFP4 = Spec(
    "nvfp4",
    "float",
    4,
    PACKED,
    6.0,
    scale_storage=E4M3,
    block=16,
    block_limit=NVFP4_SCALES[1],
    native=(8, None),
    vllm={"per_group": "nvfp4"},
)
"""Byte i holds the code of channel i in its lower four bits and the code of channel D / 2 + i in its upper four bits.
ModelOpt's export is not used: it writes amax / 448 as the layer's scale, whereas its quantizer uses amax / 2688."""

GGML_BLOCK = 32
"""Channels per block of llama.cpp's types."""


def _ggml(name: str, bits: int, limit: float) -> Spec:
    return Spec(name, "integer", bits, PACKED, limit, reference_only=True, dynamic_group=GGML_BLOCK, llamacpp=name)


GGML_TYPES = (_ggml("q8_0", 8, 127.0), _ggml("q4_0", 4, 8.0))
"""llama.cpp's types q8_0 and q4_0: integers with a scale per block. q4_0 maps the largest magnitude of a block to -8, so its
scales are signed."""

TURBOQUANT_SMALLEST_SCALE = 1e-8
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
    vllm_by_key_format={"fp8_e4m3 per_tensor": "turboquant_k8v4"},
)
"""The values of vLLM's turboquant_k8v4: codes 0 to 15 from the unrounded range and minimum, rounded half up. kvgate's own int4
computes its codes from the stored (rounded) scale and zero."""

TOKEN_HEAD_SMALLEST_SCALE = 1e-6


def _token_head(
    name: str,
    kind: Literal["float", "integer"],
    bits: int,
    storage: Element,
    limit: float,
    refines: tuple[str, bool, str],
    zero_storage: Element | None = FLOAT16,
) -> Spec:
    vllm = {"per_token": f"{refines[0].removesuffix('_e4m3')}_per_token_head"}
    return Spec(
        name, kind, bits, storage, limit, FLOAT32, zero_storage,
        arithmetic="vllm_token_head", refines=refines, reference_only=True, vllm=vllm,
    )  # fmt: skip


VLLM_TOKEN_HEAD = _token_head("vllm_token_head", "integer", 4, PACKED, 7.0, ("int4", False, "signed_hadamard"), None)
"""vLLM's INT4 codes with a zero point per token and head: a whole number of codes in the four lowest bits of the float32 scale,
which ONNX operators cannot read."""
VLLM_TOKEN_HEAD_INT8 = _token_head("vllm_token_head_int8", "integer", 8, PACKED, 127.0, ("int8", True, "none"))
VLLM_TOKEN_HEAD_FP8 = _token_head("vllm_token_head_fp8", "float", 8, E4M3, 448.0, ("fp8_e4m3", True, "none"))

CODES: dict[str, Spec] = {spec.name: spec for spec in (FP16, BF16, FP8_E4M3, FP8_E5M2, INT8, INT4, NVFP4, *GGML_TYPES)}

REFINED = (VLLM_TURBOQUANT, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_INT8, VLLM_TOKEN_HEAD_FP8)
ARITHMETICS: dict[tuple[str, str], Spec] = {(spec.arithmetic, spec.refines[0]): spec for spec in REFINED}
"""(kv.*.arithmetic, kv.*.dtype) -> format with another library's arithmetic."""
