"""The graphs with the attention plugin in them, against NVIDIA's own reading of the plugin's declarations: no GPU."""

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import tensorrt_stubs_builder as builder
from onnx import helper
from onnx_fixtures import nothing
from tensorrt_graph_cases import SM, Surgery, surgeries
from tensorrt_stubs_builder import Plan, Run, Tensor

from pipeline.formats.body import FLOAT_TYPES
from stages.engines.onnx.bundle import WEIGHTS_FILE
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.plan import Parsed, build, parse
from stages.engines.tensorrt.surgery import PLUGIN_VERSION


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    return surgeries(tmp_path_factory)


@pytest.fixture(scope="module")
def tensorrt() -> Iterator[Run]:
    with builder.nvidia() as run:
        yield run


def made(node: onnx.NodeProto, plan: Plan) -> dict[str, Tensor]:
    """What a plugin node puts out, by name."""
    return {
        out: Tensor(dtype, tuple(d[0] if len(set(d)) == 1 else d for d in dims))
        for out, (dtype, dims) in zip(node.output, plan.outputs, strict=True)
    }


def plugin_nodes(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {n.name: n for n in model.graph.node if any(a.name == "plugin_namespace" for a in n.attribute)}


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "fp8"])
def test_nvidias_builder_takes_types_and_shapes_of_every_plugin_node(
    name: str, graphs: dict[str, Surgery], tensorrt: Run
) -> None:
    """Name, namespace, version and attributes as the parser looks them up; test_tensorrt_plugin.py holds the launches."""
    surgery = graphs[name]
    for model in (surgery.model, surgery.prefill):
        known: dict[str, Tensor] = {}
        for node in plugin_nodes(model).values():
            texts = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
            assert texts == {"plugin_namespace": "kv", "plugin_version": PLUGIN_VERSION}
            given = surgery.tensors(node, known), surgery.attributes(node)
            known |= made(node, tensorrt(builder.build, f"kv::{node.op_type}", *given, parsed=True))
        assert len(plugin_nodes(model)) == 2 * len(surgery.layers.layouts) + (model is surgery.model)


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
    assert build(parsed, surgery.limits.ranges("decode"), [SM], nothing)
