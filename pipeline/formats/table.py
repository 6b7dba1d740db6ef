"""Every number format, by the name that a configuration gives it."""

from pipeline.formats.bf16.spec import BF16
from pipeline.formats.fp8_e4m3.spec import FP8_E4M3
from pipeline.formats.fp8_e5m2.spec import FP8_E5M2
from pipeline.formats.fp16.spec import FP16
from pipeline.formats.ggml.spec import TYPES as GGML
from pipeline.formats.int4.spec import INT4
from pipeline.formats.int8.spec import INT8
from pipeline.formats.nvfp4.spec import NVFP4
from pipeline.formats.spec import Spec
from pipeline.formats.vllm_token_head.spec import VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_FP8, VLLM_TOKEN_HEAD_INT8
from pipeline.formats.vllm_turboquant.spec import TYPES as VLLM_TURBOQUANTS

CODES: dict[str, Spec] = {spec.name: spec for spec in (FP16, BF16, FP8_E4M3, FP8_E5M2, INT8, INT4, NVFP4, *GGML)}
"""By kv.*.dtype."""

REFINED = (*VLLM_TURBOQUANTS, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_INT8, VLLM_TOKEN_HEAD_FP8)
ARITHMETICS: dict[tuple[str, str], Spec] = {(spec.arithmetic, spec.refines[0]): spec for spec in REFINED}
"""By kv.*.arithmetic and kv.*.dtype: formats that refine a dtype."""
