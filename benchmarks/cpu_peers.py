"""ONNX Runtime's own decode attention on a CPU: com.microsoft.GroupQueryAttention over its contiguous, quantized cache.

Its cache is symmetric with static scales, keys and values alike; a step also quantizes and appends the new token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.cpu_cases import Heads
from pipeline.formats.body import OPSET
from stages.engines.onnx.session import GraphSession
from stages.engines.onnx.surgery import IR_VERSION


@dataclass(frozen=True)
class Peer:
    """A cache of GroupQueryAttention."""

    name: str
    bits: int
    scales: str = "NONE"
    """NONE, PER_TENSOR or PER_CHANNEL, as its attribute k_quant_type names them."""


PEERS = (
    Peer("float32", 32),
    Peer("INT8 tensor", 8, "PER_TENSOR"),
    Peer("INT8 channel", 8, "PER_CHANNEL"),
    Peer("INT4 tensor", 4, "PER_TENSOR"),
    Peer("INT4 channel", 4, "PER_CHANNEL"),
)

TYPES = {32: (TensorProto.FLOAT, np.float32), 8: (TensorProto.INT8, np.int8), 4: (TensorProto.UINT8, np.uint8)}


def peer_run(peer: Peer, heads: Heads, context: int, threads: int) -> tuple[Callable[[], object], int]:
    """Return a function that decodes one token after `context` cached ones, and the bytes of these.

    Every run overwrites the same new token, so that the context does not grow.
    """
    rng = np.random.default_rng(0)
    element, dtype = TYPES[peer.bits]
    width = heads.dim // 2 if peer.bits == 4 else heads.dim
    past = [1, heads.kv, context + 64, width]
    flat = {"query": heads.query * heads.dim, "key": heads.kv * heads.dim, "value": heads.kv * heads.dim}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, size]) for name, size in flat.items()]
    inputs += [helper.make_tensor_value_info(name, element, past) for name in ("past_key", "past_value")]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in ("seqlens_k", "total_length")]
    names = [value.name for value in inputs]
    fields: dict[str, Any] = {"num_heads": heads.query, "kv_num_heads": heads.kv}
    scales = []
    if peer.scales != "NONE":
        shape = [1] if peer.scales == "PER_TENSOR" else [heads.kv, 1, heads.dim]
        scales = [numpy_helper.from_array(np.full(shape, 0.02, np.float32), name) for name in ("k_scale", "v_scale")]
        names += [""] * 5 + ["k_scale", "v_scale"]
        fields |= {"k_quant_type": peer.scales, "v_quant_type": peer.scales, "kv_cache_bit_width": peer.bits}
    results = ["out", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", names, results, domain="com.microsoft", **fields)
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 1, flat["query"]])]
    outputs += [helper.make_tensor_value_info(name, element, past) for name in results[1:]]
    model = helper.make_model(
        helper.make_graph([node], "peer", inputs, outputs, scales),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        ir_version=IR_VERSION,
    )
    session = GraphSession(Path("peer.onnx"), threads, model=model)
    for name, size in flat.items():
        session.put(name, rng.standard_normal((1, 1, size)).astype(np.float32))
    session.put("seqlens_k", np.array([context], np.int32))
    session.put("total_length", np.array([context + 1], np.int32))
    session.output("out", (1, 1, flat["query"]), np.float32)
    for side in ("key", "value"):
        present = session.output(f"present_{side}", tuple(past), dtype)
        present[...] = rng.standard_normal(past) if peer.bits == 32 else rng.integers(0, 256, past).astype(np.uint8).view(dtype)
        session.bind_input(f"past_{side}", present)
    return session.run, 2 * heads.kv * context * width * np.dtype(dtype).itemsize
