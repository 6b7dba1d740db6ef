"""Graphs that contain the attention plugin, and their inputs and outputs, for tests of TensorRT's plans."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from helpers.engines.random_llama import BY_NAME, INT4, fmt, int4_groups, make_bundle, once, shared_decoder
from stages.engines.bundle import open_bundle
from stages.engines.onnx.bundle import BACKEND, WEIGHTS_FILE, Bundle
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.paged.kernel_layout import KernelLayers
from stages.engines.tensorrt.plugin import use_plugin
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.onnx_body import FLOAT_TYPES
from stages.policies.policy import KVPolicy, LayerOverride

PROGRAMS, SPLITS, SM = 3, 3, 89

AGED = KVPolicy(
    name="aged", key=fmt("fp8_e4m3", "per_head"), value=int4_groups(32), sink_tokens=4, recent_tokens=60,
    overrides=(LayerOverride(layers=(1,), key=INT4),),
)  # fmt: skip
"""Sinks and recent tokens; the second layer's keys have a format that the kernels do not support."""

INT4_KEYS = "kv.overrides.0.key.dtype=int4: the CUDA kernels hold keys as fp16, bf16, fp8_e4m3 or int8"


@dataclass
class Surgery:
    """A policy's decode graph `model` and `prefill` graph, with attention replaced by the plugin."""

    onnx_bundle: Path
    bundle: Bundle
    model: onnx.ModelProto
    prefill: onnx.ModelProto
    layers: KernelLayers
    limits: PlanLimits

    def node(self, name: str) -> onnx.NodeProto:
        node: onnx.NodeProto
        (node,) = (node for model in (self.model, self.prefill) for node in model.graph.node if node.name == name)
        return node


def operate(onnx_bundle: Path, policy: KVPolicy) -> Surgery:
    described, _, _ = open_bundle(onnx_bundle, Bundle, BACKEND)
    model = onnx.load(onnx_bundle / "decode.onnx", load_external_data=False)
    layers = use_plugin(model, described.model, policy, "decode", programs=PROGRAMS, sm=SM)
    prefill = onnx.load(onnx_bundle / "prefill.onnx", load_external_data=False)
    assert use_plugin(prefill, described.model, policy, "prefill", programs=SPLITS, sm=SM) == layers
    limits = PlanLimits(policy, 4, 512, prefill_rows=3)
    return Surgery(onnx_bundle, described, model, prefill, layers, limits)


def surgeries(factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    """Return the graphs of three policies, each with another activation type. Their bundles are built once."""
    policies: dict[ComputeDType, KVPolicy] = {"float16": BY_NAME["fp8k_int4v"], "float32": AGED, "bfloat16": BY_NAME["fp8"]}
    decoders = {dtype: shared_decoder(factory, dtype) for dtype in policies}

    def make(root: Path) -> None:
        for dtype, policy in policies.items():
            make_bundle(decoders[dtype], root / policy.name, policy)

    root = once(factory, "surgeries", make)
    return {policy.name: operate(root / policy.name, policy) for policy in policies.values()}


def forced(surgery: Surgery, folder: Path, tokens: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a decode step, or a chunk of `tokens` tokens, after three prompts of unequal length.

    Returns the graph's inputs, and the queries, keys, values and results of its attention nodes, by tensor name.
    """
    info = surgery.bundle.model
    mode = "decode" if tokens == 1 else "prefill"
    model = onnx.load(surgery.onnx_bundle / f"{mode}.onnx", load_external_data=False)
    kind = FLOAT_TYPES[info.compute_dtype]
    nodes = [node for node in model.graph.node if node.op_type.startswith("PagedAttention_")]
    names = list(dict.fromkeys(name for node in nodes for name in (*node.input[:3], *node.output)))
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in names)
    graph = folder / f"exposed_{mode}_{info.compute_dtype}.onnx"
    onnx.save(model, graph)
    (folder / WEIGHTS_FILE).hardlink_to(surgery.onnx_bundle / WEIGHTS_FILE)
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])

    engine = load_onnx(surgery.onnx_bundle, threads=1)
    rng = np.random.default_rng(3)
    handles, _ = engine.prefill([rng.integers(0, info.vocab_size, size).tolist() for size in (5, 130, 200)])
    engine.pool.reserve(handles, tokens)
    tables, spans = engine.pool.view(handles)
    pool = {name: np.ascontiguousarray(engine.pool.array_view(name, spans)) for name in engine.pool.arrays}
    feeds = {
        "input_ids": np.arange(7, 10)[:, None] + np.arange(tokens),
        "position_ids": tables["lengths"][:, None].astype(np.int64) + np.arange(tokens),
        "last": np.full(3, tokens - 1), **tables, **pool, **engine._constants,
    }  # fmt: skip
    bound = session.io_binding()
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    for taken in session.get_inputs():
        values = feeds[taken.name] = np.ascontiguousarray(feeds[taken.name])
        bound.bind_input(taken.name, "cpu", 0, types[taken.name], values.shape, values.ctypes.data)
    for output in names:
        bound.bind_output(output)
    session.run_with_iobinding(bound)
    return feeds, dict(zip(names, bound.copy_outputs_to_cpu(), strict=True))
