"""Configuration of backend=onnxruntime, and of every backend that is built from the exported decoder."""

from typing import Literal

from pipeline.core.backends import BackendConfig, InProcessConfig


class GraphConfig(BackendConfig):
    """A backend whose engines are built from the exported ONNX decoder."""

    compute_dtype: Literal["float32", "float16", "bfloat16"]
    """Type of activations and weights; part of the graph's digest. With bfloat16 keys and values are quantized, and attended
    to where no plugin does, in float32. TensorRT alone runs such graphs."""


CpuAttention = Literal["auto", "native", "graph"]


class OnnxRuntimeConfig(GraphConfig, InProcessConfig):
    """The embedded engine: ONNX Runtime executes the graphs, on any CPU."""

    name: Literal["onnxruntime"]
    attention: CpuAttention
    """What computes attention over the cache: the kernel that is compiled on this machine, or the graph's own operators.
    auto is native where there is a C compiler."""
