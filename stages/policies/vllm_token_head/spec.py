"""Descriptions of vLLM's token-and-head formats: INT8 or E4M3 codes with a float32 scale, or INT4 codes with a zero point.

The zero point is a whole number of codes in the four lowest bits of the scale. ONNX operators cannot read these bits, so this
folder has no arithmetic_onnx.py.
"""

from typing import Literal

from stages.policies.spec import E4M3, FLOAT16, FLOAT32, PACKED, Element, Spec

SMALLEST_SCALE = 1e-6


def _spec(
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


VLLM_TOKEN_HEAD = _spec("vllm_token_head", "integer", 4, PACKED, 7.0, ("int4", False, "signed_hadamard"), zero_storage=None)
VLLM_TOKEN_HEAD_INT8 = _spec("vllm_token_head_int8", "integer", 8, PACKED, 127.0, ("int8", True, "none"))
VLLM_TOKEN_HEAD_FP8 = _spec("vllm_token_head_fp8", "float", 8, E4M3, 448.0, ("fp8_e4m3", True, "none"))
