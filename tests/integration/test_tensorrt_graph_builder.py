"""The graphs with the attention plugin in them, against NVIDIA's own reading of the plugin's declarations: no GPU."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_stubs_builder as builder
from amount import STRIDE
from onnx import helper
from onnx_fixtures import nothing
from tensorrt_graph_cases import PROGRAMS, REAL, SM, SPLITS, TYPES, Surgery, surgeries
from tensorrt_stubs_builder import Plan, Tensor

from pipeline.formats.body import FLOAT_TYPES
from plugins.kv_attention.tensorrt_nodes import node_of
from stages.engines.base import Mode
from stages.engines.onnx.bundle import WEIGHTS_FILE
from stages.engines.tensorrt.append import append_groups
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.plan import Parsed, build, parse
from stages.engines.tensorrt.plugin import (
    append_digests,
    context_digests,
    kernel_digests,
)
from stages.engines.tensorrt.surgery import PLUGIN_VERSION

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    return surgeries(tmp_path_factory)


@pytest.fixture(scope="module")
def tensorrt() -> Iterator[Run]:
    """Runs a function in the process that has NVIDIA's package, and returns what it returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(builder.prepare).result(timeout=120)
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(timeout=120)


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


def parse_rest(model: onnx.ModelProto, surgery: Surgery, folder: Path) -> Parsed:
    """Let TensorRT for RTX read what is left of a graph, without the inputs that nothing takes any more."""
    used = {taken for node in model.graph.node for taken in node.input}
    for value in list(model.graph.input):
        if value.name not in used:
            model.graph.input.remove(value)
    onnx.save(model, folder / "rest.onnx")
    (folder / WEIGHTS_FILE).hardlink_to(surgery.onnx_bundle / WEIGHTS_FILE)
    return parse(load("tensorrt_rtx"), folder / "rest.onnx")


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
    parsed = parse_rest(model, surgery, tmp_path)
    assert not [tensor.name for tensor in parsed.inputs if tensor.name.startswith("key_pool.0")]
    assert build(parsed, surgery.limits.ranges("decode"), [SM], nothing).data


@pytest.mark.skipif(STRIDE > 1, reason="12 s of CPU: make test-long")
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
    parsed = parse_rest(model, surgery, tmp_path)
    assert not [tensor.name for tensor in parsed.inputs if "_pool." in tensor.name]
    assert build(parsed, surgery.limits.ranges("prefill"), [SM], nothing).data
