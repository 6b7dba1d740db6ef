"""The graphs with the attention plugin in them, against NVIDIA's own reading of the plugin's declarations: no GPU."""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tensorrt_stubs_builder as builder
import torch
from onnx import helper
from onnx_fixtures import BY_NAME, INT4, LAYERS, fmt, int4_groups, make_bundle, nothing, shared_decoder
from tensorrt_stubs_builder import Plan, Tensor

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, LayerOverride
from plugins.kv_attention import launch, reference
from plugins.kv_attention.kernels.variants import decode_variant
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.tensorrt_nodes import ATTRIBUTES, PLAN, Operation, bits_float, node_of
from stages.engines.base import Mode
from stages.engines.bundle import BUNDLE_FILE
from stages.engines.onnx.bundle import WEIGHTS_FILE, Bundle
from stages.engines.onnx.bundle import open_bundle as open_onnx_bundle
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.onnx.export import ComputeDType
from stages.engines.onnx.graph import FLOAT_TYPES
from stages.engines.paged.kernel_layout import KernelLayers
from stages.engines.tensorrt import build as build_module
from stages.engines.tensorrt.append import append_groups, use_append
from stages.engines.tensorrt.bundle import open_bundle
from stages.engines.tensorrt.library import Library, load
from stages.engines.tensorrt.plan import Parsed, build, parse
from stages.engines.tensorrt.plan import Plan as BuiltPlan
from stages.engines.tensorrt.plugin import (
    append_digests,
    context_digests,
    default_programs,
    kernel_digests,
    write_plugin_graphs,
)
from stages.engines.tensorrt.plugin import build_bundle as build_with_plugin
from stages.engines.tensorrt.shapes import Limits
from stages.engines.tensorrt.surgery import PLUGIN_VERSION, use_context_plugin, use_plugin
from stages.engines.tensorrt.weights import as_inputs

PROGRAMS, SPLITS, SM = 3, 3, 89
TYPES = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8", "INT8": "INT8", "INT32": "INT32"}
REAL = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}

AGED = KVPolicy(
    name="aged", key=fmt("fp8_e4m3", "per_head"), value=int4_groups(32), sink_tokens=4, recent_tokens=60,
    overrides=(LayerOverride(layers=(1,), key=INT4),),
)  # fmt: skip
"""Sinks and recent tokens; keys of the second layer in a format that the kernels do not hold."""

INT4_KEYS = "kv.overrides.0.key.dtype=int4: the CUDA kernels hold keys as fp16, bf16, fp8_e4m3 or int8"

Run = Callable[..., Any]


@dataclass
class Surgery:
    """A policy's graphs, `model` of a decode step and `prefill`, after the plugin took its place in them."""

    onnx_bundle: Path
    bundle: Bundle
    model: onnx.ModelProto
    prefill: onnx.ModelProto
    layers: KernelLayers
    limits: Limits

    def node(self, name: str) -> onnx.NodeProto:
        node: onnx.NodeProto
        (node,) = (node for model in (self.model, self.prefill) for node in model.graph.node if node.name == name)
        return node

    def attributes(self, node: onnx.NodeProto) -> dict[str, int]:
        """In the order of the declaration: ONNX sorts them."""
        attributes = {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
        operation = cast(Operation, node.name.partition(".")[0])
        return {name: attributes[name] for name in ATTRIBUTES[operation] if name in attributes}

    def tensors(self, node: onnx.NodeProto, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The node's inputs, from the graph and its profile; queries, keys and values are activations."""
        several = node.name.startswith("context_partial")
        info, ranges = self.bundle.model, self.limits.ranges("prefill" if several else "decode")
        known = {value.name: value.type.tensor_type for value in self.model.graph.input}
        activations = [info.q_heads, info.kv_heads, info.kv_heads]
        tensors = {}
        for position, name in enumerate(node.input):
            if name in outputs:
                tensors[name] = outputs[name]
                continue
            dims: list[int | str]
            if name in known:
                dtype = TYPES[onnx.TensorProto.DataType.Name(known[name].elem_type)]
                dims = [dim.dim_param or dim.dim_value for dim in known[name].shape.dim]
            else:
                dtype, dims = REAL[info.compute_dtype], ["B", activations[position], 1, info.head_dim]
                if several:
                    dims = ["B", "S", activations[position], info.head_dim]
            triples = [d if isinstance(d, int) else tuple(ranges[d].model_dump().values()) for d in dims]
            tensors[name] = Tensor(dtype, tuple(t if isinstance(t, int) or len(set(t)) > 1 else t[0] for t in triples))
        return tensors


def operate(root: Path, decoder: Path, policy: KVPolicy) -> Surgery:
    onnx_bundle = make_bundle(decoder, root / policy.name, policy)
    described, _, _ = open_onnx_bundle(onnx_bundle)
    model = onnx.load(onnx_bundle / "decode.onnx", load_external_data=False)
    layers = use_plugin(model, described.model, policy, programs=PROGRAMS, sm=SM)
    prefill = onnx.load(onnx_bundle / "prefill.onnx", load_external_data=False)
    assert use_context_plugin(prefill, described.model, policy, splits=SPLITS, sm=SM) == layers
    limits, graphs = Limits(policy, 4, 512, prefill_rows=3), {"decode": model, "prefill": prefill}
    modes: tuple[Mode, ...] = ("decode", "prefill")
    for mode in modes if layers.layouts else ():
        use_append(graphs[mode], described.model, limits, layers, mode, sm=SM)
    return Surgery(onnx_bundle, described, model, prefill, layers, limits)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    root = tmp_path_factory.mktemp("surgery")
    policies: dict[ComputeDType, KVPolicy] = {"float16": BY_NAME["fp8k_int4v"], "float32": AGED, "bfloat16": BY_NAME["fp8"]}
    return {policy.name: operate(root, shared_decoder(tmp_path_factory, dtype), policy) for dtype, policy in policies.items()}


@pytest.fixture(scope="module")
def tensorrt() -> Iterator[Run]:
    """Runs a function in the process that has NVIDIA's package, and returns what it returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(builder.prepare).result(timeout=120)
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(timeout=120)


def test_layers_that_the_kernels_hold_share_a_work_list_and_get_two_plugins_the_others_keep_their_function(
    graphs: dict[str, Surgery],
) -> None:
    both, one = graphs["fp8k_int4v"], graphs["aged"]
    assert (list(both.layers.layouts), both.layers.refusals) == ([0, 1], {})
    assert list(one.layers.layouts) == [0]
    assert {layer: str(refusal) for layer, refusal in one.layers.refusals.items()} == {1: INT4_KEYS}
    for surgery in (both, one):
        assert [node.op_type for node in surgery.model.graph.node].count("plan_work") == 1
        for model in (surgery.model, surgery.prefill):
            functions = {function.name for function in model.functions}
            for layer in range(LAYERS):
                taken = layer in surgery.layers.layouts
                assert (f"PagedAttention_{layer}" in functions) == (not taken)
                assert any(node.op_type == f"PagedAttention_{layer}" for node in model.graph.node) == (not taken)
                assert (f"QuantizeKey_{layer}" in functions) == (not taken)


def test_no_plan_widens_the_pool_of_a_layer_that_the_kernels_hold(graphs: dict[str, Surgery]) -> None:
    """Of what such a layer's pools go to nothing but the plugin is left."""
    for surgery in graphs.values():
        for model in (surgery.model, surgery.prefill):
            for layer in surgery.layers.layouts:
                pools = (f"key_pool.{layer}", f"value_pool.{layer}")
                takers = {node.domain for node in model.graph.node if set(pools) & set(node.input)}
                assert takers == {"kv"}
                (attend,) = (node for node in model.graph.node if f"key_pool.{layer}" in node.input)
                assert any(attribute.name == "plugin_namespace" for attribute in attend.attribute)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (
            BY_NAME["fp8k_int4v_aged"],
            "kv.window.tokens=8192: the CUDA kernels read one copy of a token, so window must be null",
        ),
        (BY_NAME["int4_hadamard"], "kv.key.rotation=hadamard: the CUDA kernels do not rotate"),
        (BY_NAME["int8_asym"], "kv.key.symmetric=false: the CUDA kernels have no zero points"),
        (
            BY_NAME["int8_channel"],
            "kv.key.granularity=per_channel: the CUDA kernels hold int8 per_tensor, per_head or per_token",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, KVPolicy) else "",
)
def test_a_policy_that_the_kernels_do_not_hold_keeps_its_graph_and_says_why(
    policy: KVPolicy, reason: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    surgery = operate(tmp_path, shared_decoder(tmp_path_factory, "float32"), policy)
    assert surgery.layers.layouts == {}
    assert [str(refusal) for refusal in surgery.layers.refusals.values()] == [reason] * LAYERS
    for name, model in (("decode", surgery.model), ("prefill", surgery.prefill)):
        assert model == onnx.load(surgery.onnx_bundle / f"{name}.onnx", load_external_data=False)


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged"])
def test_every_plugin_node_is_one_that_nvidia_has_registered(name: str, graphs: dict[str, Surgery], tensorrt: Run) -> None:
    """Name, namespace, version, attributes and the number of tensors, as the parser looks them up."""
    surgery, declared = graphs[name], tensorrt(builder.declared)
    everything = [*surgery.model.graph.node, *surgery.prefill.graph.node]
    nodes = [n for n in everything if any(a.name == "plugin_namespace" for a in n.attribute)]
    appends = [node for node in nodes if node.op_type.startswith("append")]
    assert len(appends) == 2 * len(append_groups(surgery.layers, surgery.limits))
    assert len(nodes) - len(appends) == 4 * len(surgery.layers.layouts) + 1
    for node in nodes:
        text_attributes = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        assert text_attributes == {"plugin_namespace": "kv", "plugin_version": PLUGIN_VERSION}
        inputs, attributes, _, outputs = declared[f"{node.domain}::{node.op_type}"]
        assert (len(node.input), len(node.output)) == (len(inputs), outputs)
        assert dict.fromkeys(surgery.attributes(node), "int") == attributes
        for tensor, expected in zip(node.input, inputs, strict=True):
            # the cache's tensors carry their names, activations those of the decoder
            taken = tensor.removeprefix("append.").removeprefix("write_").partition(".")[0]
            renamed = {"pages": "page_table", "slots": "exact_slots"}
            assert renamed.get(taken, taken) == expected or expected in ("query", "key", "value", "attended"), (
                node.name,
                tensor,
            )


def test_the_work_is_divided_for_what_runs_at_once_on_the_gpu_that_builds(
    graphs: dict[str, Surgery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "sm_count", lambda _: 132)
    surgery = graphs["fp8k_int4v"]
    info = surgery.bundle.model
    programs = default_programs(info, replace(surgery.limits, max_tokens=1 << 17), sm=90)
    (resident,) = {
        decode_variant(layout, group=info.q_heads // info.kv_heads, query_dtype=info.compute_dtype, scaling=1.0, sm=90).resident
        for layout in surgery.layers.layouts.values()
    }
    assert programs == 132 * resident // info.kv_heads
    assert default_programs(info, surgery.limits, sm=90) == surgery.limits.pages


def made(node: onnx.NodeProto, plan: Plan) -> dict[str, Tensor]:
    """What a plugin node puts out, by name."""
    return {
        out: Tensor(dtype, tuple(d[0] if len(set(d)) == 1 else d for d in dims))
        for out, (dtype, dims) in zip(node.output, plan.outputs, strict=True)
    }


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "fp8"])
def test_nvidias_builder_takes_types_and_shapes_of_every_plugin_node(
    name: str, graphs: dict[str, Surgery], tensorrt: Run
) -> None:
    surgery = graphs[name]
    info, batch = surgery.bundle.model, tuple(surgery.limits.ranges("decode")["B"].model_dump().values())
    divide = surgery.node("plan_work")
    plan: Plan = tensorrt(builder.build, "kv::plan_work", surgery.tensors(divide, {}), surgery.attributes(divide))
    work = made(divide, plan)
    for layer, layout in surgery.layers.layouts.items():
        attend, join = surgery.node(f"decode_partial.{layer}"), surgery.node(f"decode_reduce.{layer}")
        partial: Plan = tensorrt(
            builder.build, f"kv::{attend.op_type}", surgery.tensors(attend, work), surgery.attributes(attend)
        )
        parts = tuple(PROGRAMS + (2 if layout.exact_tokens else 1) * b for b in batch)
        assert [dims[:2] for _, dims in partial.outputs] == [(parts, (info.q_heads,) * 3)] * 2
        sums = work | made(attend, partial)
        reduced: Plan = tensorrt(builder.build, f"kv::{join.op_type}", surgery.tensors(join, sums), surgery.attributes(join))
        assert reduced.outputs == [(REAL[info.compute_dtype], (batch, (1,) * 3, (info.q_heads,) * 3, (info.head_dim,) * 3))]
        if layer == 0:
            digests = tensorrt(kernel_digests, surgery.model, surgery.layers.layouts, info)
            kernels = {f"{op}.{n}" for op in ("decode_partial", "decode_reduce") for n in surgery.layers.layouts}
            assert set(digests) == kernels | {"plan_work"}
            assert digests["plan_work"] == hashlib.sha256(plan.ptx.encode()).hexdigest()
        assert digests[attend.name] == hashlib.sha256(partial.ptx.encode()).hexdigest()
        assert digests[join.name] == hashlib.sha256(reduced.ptx.encode()).hexdigest()


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "fp8"])
def test_nvidias_builder_takes_types_and_shapes_of_every_plugin_node_of_a_chunk(
    name: str, graphs: dict[str, Surgery], tensorrt: Run
) -> None:
    surgery = graphs[name]
    info = surgery.bundle.model
    batch, tokens = (tuple(surgery.limits.ranges("prefill")[dim].model_dump().values()) for dim in "BS")
    digests = tensorrt(context_digests, surgery.prefill, surgery.layers.layouts, info)
    assert set(digests) == {f"{op}.{n}" for op in ("context_partial", "context_reduce") for n in surgery.layers.layouts}
    for layer in surgery.layers.layouts:
        attend, join = surgery.node(f"context_partial.{layer}"), surgery.node(f"context_reduce.{layer}")
        partial: Plan = tensorrt(
            builder.build, f"kv::{attend.op_type}", surgery.tensors(attend, {}), surgery.attributes(attend)
        )
        assert [dims[1:4] for _, dims in partial.outputs] == [(tokens, (info.q_heads,) * 3, (SPLITS + 1,) * 3)] * 2
        sums = made(attend, partial)
        reduced: Plan = tensorrt(builder.build, f"kv::{join.op_type}", surgery.tensors(join, sums), surgery.attributes(join))
        assert reduced.outputs == [(REAL[info.compute_dtype], (batch, tokens, (info.q_heads,) * 3, (info.head_dim,) * 3))]
        assert digests[attend.name] == hashlib.sha256(partial.ptx.encode()).hexdigest()
        assert digests[join.name] == hashlib.sha256(reduced.ptx.encode()).hexdigest()


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "fp8"])
def test_nvidias_builder_takes_types_and_shapes_of_every_append(name: str, graphs: dict[str, Surgery], tensorrt: Run) -> None:
    surgery = graphs[name]
    info, groups = surgery.bundle.model, append_groups(surgery.layers, surgery.limits)
    digests, real = tensorrt(append_digests, groups, info, SM), REAL[info.compute_dtype]
    modes: dict[Mode, onnx.ModelProto] = {"decode": surgery.model, "prefill": surgery.prefill}
    for mode, model in modes.items():
        ranges = {dim: tuple(size.model_dump().values()) for dim, size in surgery.limits.ranges(mode).items()}
        several = (ranges["B"], (1,) * 3 if mode == "decode" else ranges["S"])
        tokens = tuple(rows * columns for rows, columns in zip(*several, strict=True))
        known = {value.name: value.type.tensor_type for value in model.graph.input}
        constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        nodes = [node for node in model.graph.node if node.name.startswith("append.group")]
        assert [node.name for node in nodes] == [group.array("append") for group in groups]
        for node, group in zip(nodes, groups, strict=True):
            layers, new = len(group.layers), (tokens, info.kv_heads, info.head_dim)
            rows = {"lengths": (tokens,), "page_table": (tokens, 1), "exact_slots": (tokens,)}
            roles: dict[str, Tensor] = {role: Tensor("INT32", dims) for role, dims in rows.items()}
            roles |= {side: Tensor(real, (layers, *new)) for side in ("key", "value")}
            roles["attended"] = Tensor(real, (*several, info.q_heads, info.head_dim))
            tensors = {}
            for role, taken in zip(node_of("append", group.layout).inputs, node.input, strict=True):
                if role in roles:
                    tensors[role] = roles[role]
                elif taken in constants:
                    tensors[role] = Tensor("FLOAT", tuple(constants[taken]))
                else:
                    dims = [ranges[d.dim_param][0] if d.dim_param else d.dim_value for d in known[taken].shape.dim]
                    dtype = TYPES[onnx.TensorProto.DataType.Name(known[taken].elem_type)]
                    tensors[role] = Tensor(dtype, tuple(dims))
            plan: Plan = tensorrt(builder.build, f"kv::{node.op_type}", tensors, surgery.attributes(node), parsed=True)
            assert plan.aliases == {}
            assert plan.outputs == [
                (tensors[role].dtype, tuple((d,) * 3 for d in tensors[role].dims))
                for role in node_of("append", group.layout).outputs
            ]
            assert plan.grid[1:] == (tokens, (layers,) * 3)
            assert digests[node.name] == hashlib.sha256(plan.ptx.encode()).hexdigest()


def without_appends(model: onnx.ModelProto, surgery: Surgery) -> None:
    """Remove the appends of a graph; what they take becomes an output."""
    dtype = FLOAT_TYPES[surgery.bundle.model.compute_dtype]
    for node in [node for node in model.graph.node if node.op_type.startswith("append")]:
        kinds = {"key": dtype, "value": dtype, "lengths": onnx.TensorProto.INT32, "pages": onnx.TensorProto.INT32}
        present = {value.name for value in model.graph.output}
        for name in node.input:
            kind = kinds.get(name.removeprefix("append.").partition(".")[0])
            if name.startswith("append.") and kind is not None and name not in present:
                model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        for value in [value for value in model.graph.output if value.name in node.output]:
            model.graph.output.remove(value)
        model.graph.node.remove(node)


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "fp8"])
def test_everything_but_the_plugins_builds_into_a_plan(name: str, graphs: dict[str, Surgery], tmp_path: Path) -> None:
    """Their results become inputs, and what they take outputs: TensorRT for RTX builds the rest of the network."""
    surgery = graphs[name]
    info, model = surgery.bundle.model, onnx.ModelProto()
    model.CopyFrom(surgery.model)
    dtype = FLOAT_TYPES[info.compute_dtype]
    without_appends(model, surgery)
    model.graph.node.remove(surgery.node("plan_work"))
    for layer in surgery.layers.layouts:
        attend, join = surgery.node(f"decode_partial.{layer}"), surgery.node(f"decode_reduce.{layer}")
        model.graph.node.remove(attend)
        model.graph.node.remove(join)
        out = helper.make_tensor_value_info(join.output[0], dtype, ["B", 1, info.q_heads, info.head_dim])
        model.graph.input.append(out)
        # keys and values go to the new codes as well, queries to the plugin alone
        query = helper.make_tensor_value_info(attend.input[0], dtype, ["B", info.q_heads, 1, info.head_dim])
        model.graph.output.append(query)
    used = {taken for node in model.graph.node for taken in node.input}
    for value in list(model.graph.input):
        if value.name not in used:
            model.graph.input.remove(value)
    onnx.save(model, tmp_path / "rest.onnx")
    (tmp_path / WEIGHTS_FILE).hardlink_to(surgery.onnx_bundle / WEIGHTS_FILE)
    parsed = parse(load("tensorrt_rtx"), tmp_path / "rest.onnx")
    assert not [tensor.name for tensor in parsed.inputs if tensor.name.startswith("key_pool.0")]
    assert build(parsed, surgery.limits.ranges("decode"), [SM], nothing).data


def test_everything_but_the_plugins_of_a_chunk_builds_into_a_plan(graphs: dict[str, Surgery], tmp_path: Path) -> None:
    surgery = graphs["fp8k_int4v"]
    info, model = surgery.bundle.model, onnx.ModelProto()
    model.CopyFrom(surgery.prefill)
    without_appends(model, surgery)
    for layer in surgery.layers.layouts:
        attend, join = surgery.node(f"context_partial.{layer}"), surgery.node(f"context_reduce.{layer}")
        for node in (attend, join):
            model.graph.node.remove(node)
        shape: list[int | str] = ["B", "S", info.q_heads, info.head_dim]
        model.graph.input.append(helper.make_tensor_value_info(join.output[0], onnx.TensorProto.FLOAT16, shape))
        for name, heads in zip(attend.input[:3], (info.q_heads, info.kv_heads, info.kv_heads), strict=True):
            shape = ["B", "S", heads, info.head_dim]
            model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, shape))
    used = {taken for node in model.graph.node for taken in node.input}
    for value in list(model.graph.input):
        if value.name not in used:
            model.graph.input.remove(value)
    onnx.save(model, tmp_path / "rest.onnx")
    (tmp_path / WEIGHTS_FILE).hardlink_to(surgery.onnx_bundle / WEIGHTS_FILE)
    parsed = parse(load("tensorrt_rtx"), tmp_path / "rest.onnx")
    assert not [tensor.name for tensor in parsed.inputs if "_pool." in tensor.name]
    assert build(parsed, surgery.limits.ranges("prefill"), [SM], nothing).data


def test_the_bundle_says_which_layers_have_the_plugin_and_which_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but TensorRT itself: the graph that it reads, and the bundle's record."""
    operators: dict[str, list[str]] = {}
    rtx = load("tensorrt_rtx")

    def parse_like_tensorrt(library: Library, graph: Path) -> Parsed:
        operators[graph.name] = [node.op_type for node in onnx.load(graph, load_external_data=False).graph.node]
        return Parsed(library, None, None, None, [], [])

    monkeypatch.setattr(build_module, "load", lambda _: Library("tensorrt", rtx.trt, rtx.log))
    monkeypatch.setattr(build_module, "parse", parse_like_tensorrt)
    monkeypatch.setattr(build_module, "build", lambda parsed, *_: BuiltPlan(b"plan", [], parsed.inputs, parsed.outputs))
    monkeypatch.setattr("stages.engines.tensorrt.plugin.check_gpu", lambda _: None)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_programs", lambda *_: PROGRAMS)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_splits", lambda *_: SPLITS)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.register", lambda: None)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.context_digests", lambda *_: {"context_partial.0": "b2"})
    monkeypatch.setattr("stages.engines.tensorrt.plugin.kernel_digests", lambda *_: {"decode_partial.0": "a1"})
    monkeypatch.setattr("stages.engines.tensorrt.plugin.append_digests", lambda *_: {"append.group0": "c3"})
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", AGED)
    out = tmp_path / "plans"
    out.mkdir()
    build_with_plugin(
        onnx_bundle, out, policy=AGED, scales=tmp_path / "onnx_bundle_scales.json", library="tensorrt",
        max_batch=4, max_tokens=512, progress=nothing,
        gpu={"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580"},
    )  # fmt: skip
    record, _, _ = open_bundle(out, "tensorrt")
    assert record.plugins == {"decode_partial.0": "a1", "context_partial.0": "b2", "append.group0": "c3"}
    assert record.native == {"1": INT4_KEYS}
    assert record.built_for.compute_capabilities == ["8.9"]
    assert "decode_partial_kstatic_vdynamic_exact" in operators["decode.onnx"]
    assert "context_partial_kstatic_vdynamic_exact" in operators["prefill.onnx"]
    assert all(names[-1] == "append_kstatic_vdynamic_exact" for names in operators.values())
    assert "PagedAttention_1" in operators["prefill.onnx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx_bundle", "onnx_bundle_scales.json", "plans"]


def test_a_graph_without_the_plugin_is_built_as_it_is_and_without_its_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> int:
        raise AssertionError("no layer has kernels")

    def parse(library: Library, graph: Path) -> Parsed:
        parsed_graphs[graph.name] = onnx.load(graph, load_external_data=False)
        return Parsed(library, None, None, None, [], [])

    parsed_graphs: dict[str, onnx.ModelProto] = {}
    rtx = load("tensorrt_rtx")
    monkeypatch.setattr(build_module, "load", lambda _: Library("tensorrt", rtx.trt, rtx.log))
    monkeypatch.setattr(build_module, "parse", parse)
    monkeypatch.setattr(build_module, "build", lambda parsed, *_: BuiltPlan(b"plan", [], parsed.inputs, parsed.outputs))
    monkeypatch.setattr("stages.engines.tensorrt.plugin.check_gpu", lambda _: None)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_programs", none)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.register", none)
    policy = BY_NAME["int8_asym"]
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", policy)
    out = tmp_path / "plans"
    out.mkdir()
    build_with_plugin(
        onnx_bundle, out, policy=policy, scales=tmp_path / "onnx_bundle_scales.json", library="tensorrt",
        max_batch=4, max_tokens=512, progress=nothing,
        gpu={"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580"},
    )  # fmt: skip
    for name in ("prefill.onnx", "decode.onnx"):
        whole = onnx.load(onnx_bundle / name, load_external_data=False)
        as_inputs(whole)
        assert parsed_graphs.pop(name) == whole
    assert parsed_graphs == {}
    assert set(open_bundle(out, "tensorrt")[0].native) == {"0", "1"}


def test_a_bundle_that_does_not_say_the_scaling_loads_and_must_be_built_again_for_the_plugin(
    graphs: dict[str, Surgery], tmp_path: Path
) -> None:
    surgery = graphs["aged"]
    older = json.loads((surgery.onnx_bundle / BUNDLE_FILE).read_text())
    del older["model"]["scaling"]
    info = Bundle.model_validate_json(json.dumps(older)).model
    assert info.scaling is None
    assert surgery.bundle.model.scaling == pytest.approx(info.head_dim**-0.5)
    bundled: dict[Mode, Path] = {"decode": surgery.onnx_bundle / "decode.onnx"}
    with pytest.raises(UserError, match=r"aged/bundle\.json: model\.scaling is missing, .*: build the engine again"):
        write_plugin_graphs(bundled, tmp_path, info=info, limits=surgery.limits, sm=SM)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "tolerance"), [("fp8k_int4v", 4e-3), ("aged", 2e-5)])
def test_the_plugin_is_given_what_the_function_that_it_replaces_computes_with(
    name: str, tolerance: float, graphs: dict[str, Surgery], tmp_path: Path
) -> None:
    """The ONNX bundle's attention in ONNX Runtime, against the kernels' reference on the node's tensors and attributes."""
    surgery = graphs[name]
    info = surgery.bundle.model
    feeds, activations = forced(surgery, tmp_path)
    for layer, layout in surgery.layers.layouts.items():
        attend, join = surgery.node(f"decode_partial.{layer}"), surgery.node(f"decode_reduce.{layer}")
        roles = dict(zip(node_of("decode_partial", layout).inputs, attend.input, strict=True))
        inputs = {role: (feeds | activations)[taken] for role, taken in roles.items() if role not in PLAN.outputs}
        tensors = {role: torch.from_numpy(np.ascontiguousarray(values)) for role, values in inputs.items()}
        for side in ("key", "value"):
            if getattr(layout, side).dtype == "fp8_e4m3":
                tensors[f"{side}_pool"] = tensors[f"{side}_pool"].view(torch.float8_e4m3fn)
            if f"{side}_scale" in tensors:
                tensors[f"{side}_scale"] = tensors[f"{side}_scale"].flatten()
        scaling = bits_float(surgery.attributes(attend)["scaling_bits"])
        assert scaling == pytest.approx(info.head_dim**-0.5, rel=1e-6)

        def attention(factor: float, layout: CacheLayout = layout, tensors: dict[str, torch.Tensor] = tensors) -> Any:
            query, key, value = (tensors[role][:, :, 0] for role in ("query", "key", "value"))
            return reference.attend(
                layout, query, key, value, tensors, page_table=tensors["page_table"], lengths=tensors["lengths"],
                scaling=factor, exact_slots=tensors.get("exact_slots"),
            ).numpy()  # fmt: skip

        expected = activations[join.output[0]][:, 0].astype(np.float32)
        assert np.abs(attention(scaling) - expected).max() <= tolerance
        assert np.abs(attention(2 * scaling) - expected).max() > 5 * tolerance  # it would be seen


@pytest.mark.parametrize(("name", "tolerance"), [("fp8k_int4v", 4e-3), ("aged", 2e-5)])
def test_the_plugin_of_a_chunk_is_given_what_the_function_that_it_replaces_computes_with(
    name: str, tolerance: float, graphs: dict[str, Surgery], tmp_path: Path
) -> None:
    surgery = graphs[name]
    info, tokens = surgery.bundle.model, 7
    feeds, activations = forced(surgery, tmp_path, tokens)
    for layer, layout in surgery.layers.layouts.items():
        attend, join = surgery.node(f"context_partial.{layer}"), surgery.node(f"context_reduce.{layer}")
        turned = {
            node.output[0]: activations[node.input[0]].transpose(node.attribute[0].ints)
            for node in surgery.prefill.graph.node if node.op_type == "Transpose" and node.output[0] in attend.input
        }  # fmt: skip
        assert len(turned) == 3
        roles = dict(zip(node_of("context_partial", layout).inputs, attend.input, strict=True))
        inputs = {role: (feeds | turned)[taken] for role, taken in roles.items()}
        tensors = {role: torch.from_numpy(np.ascontiguousarray(values)) for role, values in inputs.items()}
        for side in ("key", "value"):
            if getattr(layout, side).dtype == "fp8_e4m3":
                tensors[f"{side}_pool"] = tensors[f"{side}_pool"].view(torch.float8_e4m3fn)
            if f"{side}_scale" in tensors:
                tensors[f"{side}_scale"] = tensors[f"{side}_scale"].flatten()
        query, key, value = (tensors[role].flatten(0, 1) for role in ("query", "key", "value"))
        attended = reference.attend_context(
            layout, query, key, value, tensors, query_starts=torch.arange(0, 3 * tokens + 1, tokens),
            page_table=tensors["page_table"], lengths=tensors["lengths"],
            scaling=bits_float(surgery.attributes(attend)["scaling_bits"]), exact_slots=tensors.get("exact_slots"),
        )  # fmt: skip
        expected = activations[join.output[0]].astype(np.float32)
        assert expected.shape == (3, tokens, info.q_heads, info.head_dim)
        assert np.abs(attended.numpy().reshape(expected.shape) - expected).max() <= tolerance


def forced(surgery: Surgery, folder: Path, tokens: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """One decode step, or a chunk of more tokens, after three prompts of unequal length: what the graph is fed, and its
    attention nodes' queries, keys, values and results, by tensor."""
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
