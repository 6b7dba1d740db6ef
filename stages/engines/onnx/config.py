"""Configuration of backend=onnxruntime, and the base class for all backends that use the exported decoder."""

from typing import Literal

from stages.core.errors import UserError
from stages.engines.config import BackendConfig, InProcessConfig

ComputeDType = Literal["float32", "float16", "bfloat16"]


class GraphConfig(BackendConfig):
    """A backend whose engines are built from the exported ONNX decoder."""

    compute_dtype: ComputeDType
    """Type of activations and weights. Only TensorRT runs bfloat16. bfloat16 graphs compute
    quantization, and attention outside the plugin, in float32."""


CpuAttention = Literal["auto", "native", "graph"]


class OnnxRuntimeConfig(GraphConfig, InProcessConfig):
    """The default engine: ONNX Runtime executes the graph on a CPU."""

    name: Literal["onnxruntime"]
    attention: CpuAttention
    """Implementation of attention over the cache: `native` is a kernel compiled on this machine, `graph` the graph's operators.
    `auto` means native on Linux with a C compiler and AVX2."""


def refuse_bfloat16(compute_dtype: str) -> None:
    """Raise UserError for bfloat16, which ONNX Runtime does not support."""
    if compute_dtype == "bfloat16":
        raise UserError(
            "backend.compute_dtype=bfloat16: ONNX Runtime lacks bfloat16 kernels for most of a decoder's operators; set "
            "backend.compute_dtype=float32 or float16, or use backend=tensorrt, backend=tensorrt_rtx, or backend=torch "
            "backend.device=cuda"
        )
