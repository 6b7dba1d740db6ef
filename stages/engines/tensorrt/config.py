"""Configurations of backend=tensorrt and backend=tensorrt_rtx."""

from typing import Annotated, Literal

from pydantic import Field

from stages.engines.onnx.config import GraphConfig
from stages.policies.policy import PAGE_TOKENS


class PlanConfig(GraphConfig):
    """TensorRT plans built from the ONNX engine's graph."""

    length_key = "max_tokens"
    name: str
    max_batch: Annotated[int, Field(ge=1, le=1024)]
    """Maximum sequences of a decode step."""
    max_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Maximum tokens of one sequence. Loading the engine allocates a pool for max_batch sequences of this length."""


class TensorRTConfig(PlanConfig):
    """TensorRT, which builds plans with the attention plugin on the GPU that will run them."""

    name: Literal["tensorrt"]


RTXTarget = Literal[80, 86, 89, 120, 121]
"""Compute capabilities that TensorRT for RTX 1.7 builds for (tensorrt_rtx.ComputeCapability). For 75 it refuses every graph,
because attention multiplies in float32 ("FP32 GEMM is not supported")."""


class TensorRTRTXConfig(PlanConfig):
    """TensorRT for RTX, which builds plans for the named GPUs, even on a machine without a GPU."""

    name: Literal["tensorrt_rtx"]
    compute_capabilities: Annotated[tuple[RTXTarget, ...], Field(min_length=1, strict=False)]
    """Compute capabilities that the plans have code for; 89 means SM 8.9."""
