"""Graphs whose attention over the cache is the plugin's: kv.PagedAttention_N becomes two plugin nodes.

The attention of parts of sequences and the reduction of these are two plugins, because an ahead-of-time plugin launches one
kernel; the partial sums between them are ordinary tensors. So is the work list of both, which one more plugin makes of the
lengths, once for all layers of the decode graph. In the prefill graph pages are read where they lie, while the function's body
gathers all and, of FP8, first widens the whole pool. Layers whose formats the kernels do not hold keep their function body.
"""

from typing import Any

import onnx
from onnx import helper

from pipeline.core.kv import KVPolicy
from pipeline.formats.body import DOMAIN, NUMPY_FLOATS, cache_arithmetic, layer_function
from plugins.kv_attention.tensorrt_nodes import (
    CONTEXT_REDUCE,
    NAMESPACE,
    PLAN,
    REDUCE,
    Compute,
    Node,
    context_attributes,
    decode_attributes,
    node_of,
    plan_attributes,
    reduce_attributes,
)
from stages.engines.base import Mode
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.functions import AttentionSpec
from stages.engines.paged.kernel_layout import KernelLayers, choose_layers

PLUGIN_VERSION = "1"
"""Version of every quickly deployable plugin."""

COMPUTE: dict[str, Compute] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def use_plugin(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, *, programs: int, sm: int) -> KernelLayers:
    """Replace the attention of every layer that the kernels hold, in place, in the decode graph.

    Args:
        model: The decode graph of a bundle.
        info: The bundle's model, with the attention's scaling.
        policy: The bundle's policy.
        programs: Programs over the pages of a KV head that run at once.
        sm: Compute capability of the GPU that the kernels are compiled for, 90 say.

    Returns:
        The layers that were replaced, and why the others were not.
    """
    layers, scaling = choose_layers(policy, info.shape, info.q_heads), _scaling(info)
    for layer, layout in layers.layouts.items():
        node, names = _attention(model, info, policy, layer, "decode")
        names |= {name: f"{name}.plan" for name in PLAN.outputs}
        if not any(made.name == PLAN.operation for made in model.graph.node):
            # The exact tokens are the policy's, and with them the work list is the same in every layer.
            outputs = [names[name] for name in PLAN.outputs]
            attributes = plan_attributes(layout, programs=programs, sm=sm)
            model.graph.node.insert(0, plugin_node(PLAN, [names["lengths"]], outputs, attributes))
        partial = node_of("decode_partial", layout)
        sums = [f"{name}.{layer}" for name in partial.outputs]
        attributes = decode_attributes(layout, scaling=scaling, sm=sm)
        attend = plugin_node(partial, [names[name] for name in partial.inputs], sums, attributes, layer)
        join = plugin_node(
            REDUCE, [*sums, names["sequences"]], list(node.output), reduce_attributes(COMPUTE[info.compute_dtype], sm), layer
        )
        _replace(model, node, [attend, join])
    return layers


def use_context_plugin(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, *, splits: int, sm: int) -> KernelLayers:
    """Replace the attention of every layer that the kernels hold, in place, in the prefill graph.

    The plugin takes new tokens as they lie in memory for the decoder's linear layers, heads of a token together, and the graph
    has them by head: Transposes are put before it, which cancel out with those that the decoder has there.

    Args:
        model: The prefill graph of a bundle.
        info: The bundle's model, with the attention's scaling.
        policy: The bundle's policy.
        splits: Splits over the pages of a sequence.
        sm: Compute capability of the GPU that the kernels are compiled for, 90 say.

    Returns:
        The layers that were replaced, and why the others were not.
    """
    layers, scaling = choose_layers(policy, info.shape, info.q_heads), _scaling(info)
    for layer, layout in layers.layouts.items():
        node, names = _attention(model, info, policy, layer, "prefill")
        turned = []
        for role in ("query", "key", "value"):
            by_token = f"{role}.by_token.{layer}"
            turned.append(helper.make_node("Transpose", [names[role]], [by_token], name=by_token, perm=[0, 2, 1, 3]))
            names[role] = by_token
        partial = node_of("context_partial", layout)
        sums = [f"{name}.{layer}" for name in partial.outputs]
        attributes = context_attributes(layout, splits=splits, scaling=scaling, sm=sm)
        attend = plugin_node(partial, [names[name] for name in partial.inputs], sums, attributes, layer)
        joined = reduce_attributes(COMPUTE[info.compute_dtype], sm)
        _replace(model, node, [*turned, attend, plugin_node(CONTEXT_REDUCE, sums, list(node.output), joined, layer)])
    return layers


def _scaling(info: ModelInfo) -> float:
    """The factor of the scores: the function body multiplies queries with it in its own arithmetic, and so do the kernels."""
    assert info.scaling is not None, "write_plugin_graphs refuses bundles without it"
    return float(NUMPY_FLOATS[cache_arithmetic(info.compute_dtype)](info.scaling))


def _attention(
    model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, layer: int, mode: Mode
) -> tuple[onnx.NodeProto, dict[str, str]]:
    """A layer's attention node, and the tensors that it takes by their names in its function."""
    function = layer_function("PagedAttention", layer)
    (node,) = (node for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, function))
    spec = AttentionSpec(policy, info.shape, layer, info.q_heads, _scaling(info), info.compute_dtype, mode)
    return node, dict(zip(["query", "key", "value", *spec.tables, *spec.cache], node.input, strict=True))


def _replace(model: onnx.ModelProto, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> None:
    """Put nodes in the place of one, and remove the function that it called."""
    position = list(model.graph.node).index(node)
    (body,) = (body for body in model.functions if (body.domain, body.name) == (node.domain, node.op_type))
    model.graph.node.remove(node)
    for new in reversed(nodes):
        model.graph.node.insert(position, new)
    model.functions.remove(body)


def plugin_node(
    node: Node, inputs: list[str], outputs: list[str], attributes: dict[str, int], part: int | str | None = None
) -> onnx.NodeProto:
    """Return the ONNX node of a plugin, whose name, version and namespace TensorRT's parser looks for in its registry.

    Args:
        node: The operation.
        inputs: Its tensors in the graph, in order.
        outputs: Likewise.
        attributes: Its attributes.
        part: The layer, or the group of layers, which its name ends in; None for what a step has once.
    """
    name = node.operation if part is None else f"{node.operation}.{part}"
    fields: dict[str, Any] = {"plugin_namespace": NAMESPACE, "plugin_version": PLUGIN_VERSION, **attributes}
    return helper.make_node(node.name, inputs, outputs, name=name, domain=NAMESPACE, **fields)
