"""What the tests of the kernel engine on a CPU and on a GPU share."""

import numpy as np
from onnx_fixtures import FP8, fmt

from pipeline.core.kv import KVPolicy, KVShape, LayerOverride

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64)
"""Of the trained tiny model."""

GUARDED = KVPolicy(
    name="guarded",
    key=FP8,
    value=fmt("int4", "per_group", group_size=32),
    sink_tokens=3,
    recent_tokens=40,
    overrides=(LayerOverride(layers=(1,), key=fmt("int8", "per_token"), value=fmt("bf16")),),
)
"""Sinks, recent tokens, and layers of two formats."""

CLOSE = 3e-4
"""Of the logits' norm. The kernels round weights of values to float16 and sum in another order, and are held to 2e-3 of an
attention's norm in tests/integration/test_kernel_decode.py; and a value on a border between two codes may get the other one
in the next layer. Measured 2e-5 to 9e-5; a format that is read wrongly moves logits by far more, as the canary shows."""


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest L2 distance of two rows of logits, over the norm of the second."""
    norms = np.linalg.norm((a - b).astype(np.float64), axis=-1) / np.linalg.norm(b.astype(np.float64), axis=-1)
    return float(norms.max())
