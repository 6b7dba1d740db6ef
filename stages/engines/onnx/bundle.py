"""The engine bundle of backend=onnxruntime on disk, and the check that it is unchanged since the build."""

from stages.core.strict import StrictModel
from stages.engines.bundle import BundleRecord
from stages.engines.onnx.config import ComputeDType
from stages.policies.policy import KVShape

BACKEND = "onnxruntime"
GRAPH = "model.onnx"
"""The graph of prefill and decode steps."""
WEIGHTS_FILE = "weights.bin"
SKELETON_NODE = "Attention"
"""Operator that replaces a layer's attention in the decoder skeleton."""


NOT_FINITE = "not_finite"
"""Name of the output (B, L * 2 * H, S, 1) that is nonzero if a new key or value is not finite as float16, the type of exact
copies, stored scales and zeros. The second dimension is ordered by layer, then key before value, then head."""


class ModelInfo(StrictModel):
    """`model.json` of the decoder skeleton."""

    compute_dtype: ComputeDType
    """Type of weights and activations. Only TensorRT runs bfloat16: ONNX Runtime lacks bfloat16 kernels for most operators."""
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """Maximum sequence length in tokens. Only the Python interface reads it."""
    weights_sha256: str
    scaling: float
    """Factor of the attention's scores, the same in all layers."""
    windows: tuple[int | None, ...] = ()
    """Sliding windows by layer; see KVShape."""
    softcap: float | None = None
    """Cap c in all layers: scores become c * tanh(scores / c). None: no cap."""
    sinks: bool = False
    """Whether every query head has a learned score that takes part in the softmax. The scores are an input of the attention."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.windows)


class Bundle(BundleRecord):
    """`bundle.json`."""

    model: ModelInfo

    @property
    def shape(self) -> KVShape:
        return self.model.shape
