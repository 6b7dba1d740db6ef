"""Graphs with the attention plugin: its nodes receive the same inputs as the functions that they replace."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from helpers.engines.random_llama import BY_NAME, INT4, LAYERS, fmt, int4_groups, make_bundle, shared_decoder
from onnx import helper

from benchmarks import attention_reference as reference
from plugins.kv_attention import launch
from plugins.kv_attention.tensorrt_nodes import PLAN, node_of, read_setting
from stages.engines.bundle import open_bundle
from stages.engines.onnx.bundle import BACKEND, GRAPH, WEIGHTS_FILE, Bundle
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.paged.kernel_layout import KernelLayers, choose_layers
from stages.engines.tensorrt.bundle import one_token
from stages.engines.tensorrt.plugin import insert_plugin
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.arithmetic_onnx import FLOAT_TYPES
from stages.policies.policy import KVPolicy, LayerOverride

SM = 89

AGED = KVPolicy(
    name="aged", key=fmt("fp8_e4m3", "per_head"), value=int4_groups(32), sink_tokens=4, recent_tokens=60,
    overrides=(LayerOverride(layers=(1,), key=INT4),),
)  # fmt: skip
"""Sinks and recent tokens; the second layer's keys have a format that the kernels do not support."""

INT4_KEYS = "kv.overrides.0.key.dtype=int4: the CUDA kernels hold keys as fp16, bf16, fp8_e4m3 or int8"


@dataclass
class PluginGraphs:
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


def make_plugin_graphs(onnx_bundle: Path, policy: KVPolicy) -> PluginGraphs:
    described, _, _ = open_bundle(onnx_bundle, Bundle, BACKEND)
    info, limits = described.model, PlanLimits(policy, 4, 512)
    model, prefill = (onnx.load(onnx_bundle / GRAPH, load_external_data=False) for _ in range(2))
    one_token(model.graph)
    layers = choose_layers(policy, info.shape, info.q_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.engines.tensorrt.plugin.register", lambda *_: None)
        patch.setattr(launch, "sm_count", lambda _: 132)
        assert insert_plugin(model, "decode", info, limits, sm=SM) == layers.refusals
        assert insert_plugin(prefill, "prefill", info, limits, sm=SM) == layers.refusals
    return PluginGraphs(onnx_bundle, described, model, prefill, layers, limits)


def run_attention(plugin_graphs: PluginGraphs, folder: Path, tokens: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a decode step, or a chunk of `tokens` tokens, after three prompts of unequal length.

    Returns the graph's inputs, and the queries, keys, values and results of its attention nodes, by tensor name.
    """
    info = plugin_graphs.bundle.model
    model = onnx.load(plugin_graphs.onnx_bundle / GRAPH, load_external_data=False)
    kind = FLOAT_TYPES[info.compute_dtype]
    nodes = [node for node in model.graph.node if node.op_type.startswith("PagedAttention_")]
    names = list(dict.fromkeys(name for node in nodes for name in (*node.input[:3], *node.output)))
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in names)
    graph = folder / "exposed.onnx"
    onnx.save(model, graph)
    (folder / WEIGHTS_FILE).hardlink_to(plugin_graphs.onnx_bundle / WEIGHTS_FILE)
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])

    engine = load_onnx(plugin_graphs.onnx_bundle, threads=1)
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
    for argument in session.get_inputs():
        values = feeds[argument.name] = np.ascontiguousarray(feeds[argument.name])
        bound.bind_input(argument.name, "cpu", 0, types[argument.name], values.shape, values.ctypes.data)
    for output in names:
        bound.bind_output(output)
    session.run_with_iobinding(bound)
    return feeds, dict(zip(names, bound.copy_outputs_to_cpu(), strict=True))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PluginGraphs]:
    """The graphs of two policies, each with another activation type."""
    policies: dict[ComputeDType, KVPolicy] = {"float16": BY_NAME["fp8k_int4v"], "float32": AGED}
    root = tmp_path_factory.mktemp("surgeries")
    return {
        policy.name: make_plugin_graphs(
            make_bundle(shared_decoder(tmp_path_factory, dtype), root / policy.name, policy), policy
        )
        for dtype, policy in policies.items()
    }


def test_supported_layers_get_two_plugins_that_read_the_pools(graphs: dict[str, PluginGraphs]) -> None:
    all_layers, mixed = graphs["fp8k_int4v"], graphs["aged"]
    assert (list(all_layers.layers.layouts), all_layers.layers.refusals) == ([0, 1], {})
    assert list(mixed.layers.layouts) == [0]
    assert {layer: str(refusal) for layer, refusal in mixed.layers.refusals.items()} == {1: INT4_KEYS}
    for plugin_graphs in (all_layers, mixed):
        assert [node.op_type for node in plugin_graphs.model.graph.node].count("plan_work") == 1
        for model in (plugin_graphs.model, plugin_graphs.prefill):
            functions = {function.name for function in model.functions}
            for layer in range(LAYERS):
                has_plugin = layer in plugin_graphs.layers.layouts
                assert (f"PagedAttention_{layer}" in functions) == (not has_plugin)
                assert any(node.op_type == f"PagedAttention_{layer}" for node in model.graph.node) == (not has_plugin)
                assert f"QuantizeKey_{layer}" in functions
                pools = {f"key_pool.{layer}", f"value_pool.{layer}"}
                takers = {node.domain for node in model.graph.node if pools & set(node.input)}
                assert not has_plugin or takers == {"kv"}, "only the plugin reads these pools"


@pytest.mark.parametrize("tokens", [1, 7], ids=["step", "chunk"])
@pytest.mark.parametrize(("name", "tolerance"), [("fp8k_int4v", 4e-3), ("aged", 2e-5)])
def test_the_plugin_gets_the_inputs_of_the_replaced_function(
    name: str, tolerance: float, tokens: int, graphs: dict[str, PluginGraphs], tmp_path: Path
) -> None:
    """Compare the ONNX bundle's attention in ONNX Runtime with the kernels' reference on the plugin's inputs."""
    plugin_graphs, operation = graphs[name], "decode" if tokens == 1 else "context"
    info = plugin_graphs.bundle.model
    feeds, activations = run_attention(plugin_graphs, tmp_path, tokens)
    for layer, layout in plugin_graphs.layers.layouts.items():
        attend, join = (plugin_graphs.node(f"{operation}_{part}.{layer}") for part in ("partial", "reduce"))
        turned = {
            node.output[0]: activations[node.input[0]].transpose(node.attribute[0].ints)
            for node in plugin_graphs.prefill.graph.node if node.name.endswith(f".by_token.{layer}") and tokens > 1
        }  # fmt: skip
        assert len(turned) == (0 if tokens == 1 else 3)
        roles = dict(zip(node_of(f"{operation}_partial", layout).inputs, attend.input, strict=True))  # type: ignore[arg-type]
        inputs = {role: (feeds | activations | turned)[at] for role, at in roles.items() if role not in PLAN.outputs}
        tensors = {role: torch.from_numpy(np.ascontiguousarray(values)) for role, values in inputs.items()}
        for side in ("key", "value"):
            if getattr(layout, side).dtype == "fp8_e4m3":
                tensors[f"{side}_pool"] = tensors[f"{side}_pool"].view(torch.float8_e4m3fn)
            if f"{side}_scale" in tensors:
                tensors[f"{side}_scale"] = tensors[f"{side}_scale"].flatten()
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in attend.attribute}
        setting = read_setting(node_of(f"{operation}_partial", layout), values)  # type: ignore[arg-type]
        assert setting.layout == layout
        scaling = setting.scaling
        assert scaling == pytest.approx(info.head_dim**-0.5, rel=1e-6)
        q, k, v = (x[:, :, 0] if tokens == 1 else x.flatten(0, 1) for x in (tensors[r] for r in ("query", "key", "value")))
        expected = activations[join.output[0]].astype(np.float32)
        assert expected.shape == (3, tokens, info.q_heads, info.head_dim)
        tables: dict[str, Any] = {name: tensors[name] for name in ("page_table", "lengths", "exact_slots") if name in tensors}
        attended = (reference.attend(layout, q, k, v, tensors, scaling=factor * scaling, **tables) for factor in (1, 2))
        error, scaled_error = (np.abs(out.numpy().reshape(expected.shape) - expected).max() for out in attended)
        assert error <= tolerance
        assert scaled_error > 5 * tolerance  # a wrong scaling would be noticed


def test_a_graph_without_supported_layers_is_unchanged(graphs: dict[str, PluginGraphs]) -> None:
    model = onnx.load(graphs["aged"].onnx_bundle / GRAPH, load_external_data=False)
    before = model.SerializeToString()
    unsupported = replace(graphs["aged"].limits, policy=BY_NAME["int8_asym"])
    assert set(insert_plugin(model, "decode", graphs["aged"].bundle.model, unsupported, sm=SM)) == {0, 1}
    assert model.SerializeToString() == before
