"""Graphs that store their new tokens: the plugin kv::append at the end of a step, for the layers that the kernels hold.

One append stores all layers of one layout, as many as fit one tensor of TensorRT. It quantizes, and writes codes, scales and
exact copies where they belong, so that these layers have neither quantizing functions nor outputs of codes. What it writes are
its outputs, `appended_<array>.group<g>`, which the engine binds to the memory of the inputs `<array>.group<g>`; attention reads
the same memory layer by layer.

Shapes: l layers of a group, B sequences, S new tokens of each, H KV heads, D head_dim, NS pages and MS exact buffers of a layer
in its stack.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pipeline.formats.body import NUMPY_FLOATS, cache_arithmetic
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.tensorrt_nodes import Layered, attributes_of, node_of
from stages.engines.base import Mode
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.surgery import INT32, NOT_FINITE, Dims
from stages.engines.paged.kernel_layout import KernelLayers
from stages.engines.tensorrt.extents import MOST_ELEMENTS
from stages.engines.tensorrt.shapes import Limits
from stages.engines.tensorrt.stored import APPENDED, PAGES, POSITIONS, SLOTS, appended, of_group
from stages.engines.tensorrt.surgery import plugin_node

ATTENTION: dict[Mode, tuple[Layered, str]] = {
    "decode": ("decode_partial", "decode_reduce"),
    "prefill": ("context_partial", "context_reduce"),
}
"""The two plugins of a layer's attention in each graph."""


@dataclass(frozen=True)
class Group:
    """Layers that one append stores."""

    number: int
    layout: CacheLayout
    layers: list[int]

    def array(self, name: str) -> str:
        """Return the input in which an array of all of its layers lies."""
        return of_group(name, self.number)


def append_groups(layers: KernelLayers, limits: Limits) -> list[Group]:
    """Return the groups of the layers that the kernels hold, in the order of their first layers.

    TensorRT documents fewer than 2^31 elements for a tensor of a network: a larger stack is several.
    """
    by_layout: dict[CacheLayout, list[int]] = {}
    for layer, layout in layers.layouts.items():
        by_layout.setdefault(layout, []).append(layer)
    parts = []
    for layout, members in by_layout.items():
        arrays = layout.pools(limits.fixed["NS"]) | layout.exact_buffers(limits.fixed["MS"])
        most = max(1, MOST_ELEMENTS // max(math.prod(shape) for _, shape in arrays.values()))
        parts += [(layout, members[first : first + most]) for first in range(0, len(members), most)]
    return [Group(number, *part) for number, part in enumerate(sorted(parts, key=lambda part: part[1]))]


def use_append(model: onnx.ModelProto, info: ModelInfo, limits: Limits, layers: KernelLayers, mode: Mode, *, sm: int) -> None:
    """Let a graph store the tokens of the layers that the kernels hold, in place.

    Args:
        model: A graph that has the attention plugin in these layers.
        info: The bundle's model.
        limits: What the plan is sized for.
        layers: The layers that the kernels hold, at least one.
        mode: Which of the two graphs.
        sm: Compute capability of the GPU that the kernels are compiled for, 90 say.
    """
    graph = model.graph
    rows: Dims = ["B", 1 if mode == "decode" else "S"]
    exact = any(layout.exact_tokens for layout in layers.layouts.values())
    for name in (POSITIONS, PAGES, *([SLOTS] if exact else [])):
        graph.input.append(helper.make_tensor_value_info(name, INT32, rows))
    _decide(graph, info)
    graph.output.append(helper.make_tensor_value_info(APPENDED, INT32, rows))
    _reshape(graph, APPENDED, "append.lengths", [-1])
    _reshape(graph, PAGES, "append.pages", [-1, 1])
    if exact:
        _reshape(graph, SLOTS, "append.slots", [-1])
    # The append overwrites exact slots that attention reads, and TensorRT cannot know that they are the same memory. What the
    # last of these layers' attention returns depends on that of all layers before it, and the append takes it as an input:
    # nothing that TensorRT can fold or move, since it does not see that the kernel leaves the input alone.
    nodes = {node.name: node for node in graph.node}
    attended = nodes[f"{ATTENTION[mode][1]}.{max(layers.layouts)}"].output[0]
    for group in append_groups(layers, limits):
        _append_group(graph, info, mode, group, attended, sm)
    _drop_quantization(model, layers)


def _decide(graph: onnx.GraphProto, info: ModelInfo) -> None:
    """Write APPENDED: a step stores all of its tokens or none, since one that is refused would overwrite what is still read."""
    zero = np.zeros((), NUMPY_FLOATS[cache_arithmetic(info.compute_dtype)])
    constants = {"float": zero, "int": np.int32(0), "none": np.int32(-1), "axes": np.array([1, 3]), "all": np.array([0, 1])}
    for name, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), f"append.{name}"))

    def op(operator: str, out: str, *inputs: str, **attributes: int) -> None:
        fields: dict[str, Any] = {"name": out, **attributes}
        graph.node.append(helper.make_node(operator, list(inputs), [out], **fields))

    op("ReduceSum", "append.sums", NOT_FINITE, "append.axes", keepdims=0)
    op("Less", "append.padding", POSITIONS, "append.int")
    # Sums, and not a maximum, which a GPU takes over the numbers alone: NaN stays NaN.
    op("Where", "append.real_sums", "append.padding", "append.float", "append.sums")
    op("ReduceSum", "append.sum", "append.real_sums", "append.all", keepdims=1)
    op("Equal", "append.finite", "append.sum", "append.float")
    op("Where", APPENDED, "append.finite", POSITIONS, "append.none")


def _append_group(graph: onnx.GraphProto, info: ModelInfo, mode: Mode, group: Group, attended: str, sm: int) -> None:
    """Write one append, with its inputs and outputs."""
    partial, _ = ATTENTION[mode]
    nodes = {node.name: node for node in graph.node}
    roles = node_of(partial, group.layout).inputs
    taken = [dict(zip(roles, nodes[f"{partial}.{layer}"].input, strict=True)) for layer in group.layers]
    tensors = {"page_table": "append.pages", "lengths": "append.lengths", "exact_slots": "append.slots", "attended": attended}
    for side in ("key", "value"):
        tensors[side], joined = group.array(f"append.{side}"), taken[0][side]
        if len(group.layers) > 1:
            joined = group.array(f"append.{side}s")
            graph.node.append(helper.make_node("Concat", [tensor[side] for tensor in taken], [joined], name=joined, axis=0))
        # (l * B, H, 1, D) of a decode step lies in memory as (l * B, 1, H, D) does, and of a chunk it is (l * B, S, H, D).
        _reshape(graph, joined, tensors[side], [len(group.layers), -1, info.kv_heads, info.head_dim])
    written = {tensor.name: tensor for tensor in graph.initializer}
    known = {value.name: value.type.tensor_type for value in graph.input}
    node = node_of("append", group.layout)
    for name in node.inputs:
        if name in ("key_scale", "value_scale"):
            tensors[name] = group.array(f"write_{name}")
            scales = [numpy_helper.to_array(written[f"write_{name}.{layer}"]).reshape(-1) for layer in group.layers]
            graph.initializer.append(numpy_helper.from_array(np.stack(scales), tensors[name]))
        elif name not in tensors:
            tensors[name] = group.array(name)
            kind = known[f"{name}.{group.layers[0]}"]
            first, *inner = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
            dims: Dims = [len(group.layers), f"{first}S", *inner]
            graph.input.append(helper.make_tensor_value_info(tensors[name], kind.elem_type, dims))
            graph.output.append(helper.make_tensor_value_info(appended(tensors[name]), kind.elem_type, dims))
    graph.node.append(
        plugin_node(
            node,
            [tensors[name] for name in node.inputs],
            [appended(tensors[name]) for name in node.outputs],
            attributes_of(node, group.layout, sm=sm),
            f"group{group.number}",
        )
    )


def _drop_quantization(model: onnx.ModelProto, layers: KernelLayers) -> None:
    """Remove what codes of these layers came from: outputs, the nodes that make them, their functions and constants."""
    graph = model.graph

    def of_layers(name: str, begin: str) -> bool:
        layer = name.rpartition(".")[2]
        return name.startswith(begin) and layer.isdigit() and int(layer) in layers.layouts

    for value in [value for value in graph.output if of_layers(value.name, "new_")]:
        graph.output.remove(value)
    called = set()
    for node in [node for node in graph.node if of_layers(node.output[0], "new_")]:
        called.add((node.domain, node.op_type))
        graph.node.remove(node)
    for function in [function for function in model.functions if (function.domain, function.name) in called]:
        model.functions.remove(function)
    for tensor in [tensor for tensor in graph.initializer if of_layers(tensor.name, "write_")]:
        graph.initializer.remove(tensor)


def _reshape(graph: onnx.GraphProto, source: str, out: str, shape: list[int]) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{out}.shape"))
    graph.node.append(helper.make_node("Reshape", [source, f"{out}.shape"], [out], name=out))
