"""The engine bundle of backend=onnxruntime on disk, and the check that it is still what was built."""

from pathlib import Path
from typing import Literal

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.scales import KVScales
from pipeline.core.strict import StrictModel
from stages.engines import bundle as bundles
from stages.engines.bundle import BUNDLE_FILE, ModelRecord

BACKEND = "onnxruntime"
GRAPHS = ("prefill.onnx", "decode.onnx")
WEIGHTS_FILE = "weights.bin"
SKELETON_NODE = "Attention"
"""Operator of the decoder skeleton in place of one layer's attention."""


class ModelInfo(StrictModel):
    """`model.json` of the decoder skeleton."""

    model_type: str
    compute_dtype: Literal["float32", "float16", "bfloat16"]
    """bfloat16 is for TensorRT alone: ONNX Runtime has no kernels of it for most of a decoder's operators."""
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    weights_sha256: str
    scaling: float
    """Factor of the attention's scores, the same in all layers."""
    windows: tuple[int | None, ...] = ()
    """See KVShape."""
    softcap: float | None = None
    """c of scores that become c * tanh(scores / c) in all layers; None leaves them."""
    sinks: bool = False
    """Whether each query head has a learned score that takes its share of the softmax, an input of the attention."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.windows)


class Bundle(ModelRecord):
    """`bundle.json`."""

    graph_digest: str
    """sha256 of decode.onnx, which evaluations cite."""
    model: ModelInfo

    @property
    def shape(self) -> KVShape:
        return self.model.shape


def open_bundle(directory: Path) -> tuple[Bundle, KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle, policy, scales = bundles.open_bundle(directory, Bundle, BACKEND)
    if bundle.files.get("decode.onnx") != bundle.graph_digest:
        raise UserError(f"{directory / BUNDLE_FILE}: graph_digest is not decode.onnx's: build the engine again")
    return bundle, policy, scales
