"""A decode graph whose attention over the cache is the plugin's: kv.PagedAttention_N becomes two plugin nodes.

The split attention and the reduction of its splits are two plugins, because an ahead-of-time plugin launches one kernel; the
partial sums between them are ordinary tensors. Layers whose formats the kernels do not hold keep their function body.
"""

from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper, numpy_helper

from pipeline.core.kv import KVPolicy, KVShape
from plugins.kv_attention.kernels.variants import GROUP_LIMIT
from plugins.kv_attention.layout import CacheLayout, SideLayout
from plugins.kv_attention.tensorrt_nodes import (
    NAMESPACE,
    REDUCE,
    Compute,
    Node,
    decode_attributes,
    node_of,
    reduce_attributes,
)
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.functions import AttentionSpec
from stages.engines.onnx.graph import DOMAIN, layer_function

PLUGIN_VERSION = "1"
"""Of every quickly deployable plugin."""

COMPUTE: dict[str, Compute] = {"float32": "fp32", "float16": "fp16"}


@dataclass(frozen=True)
class Replaced:
    """What became of a graph's layers."""

    layouts: dict[int, CacheLayout]
    """By layer: those that the plugin attends to."""
    native: dict[int, str]
    """By layer: why its function body stayed."""


def plugin_layout(policy: KVPolicy, shape: KVShape, layer: int, q_heads: int) -> CacheLayout:
    """What the kernels take one layer's cache for. Raises ValueError, saying why, for a cache that they do not hold."""
    if policy.window is not None:
        raise ValueError("a window keeps a second copy of young tokens, which the kernels do not read")
    if q_heads > GROUP_LIMIT * shape.kv_heads:
        raise ValueError(
            f"the kernels take up to {GROUP_LIMIT} query heads a KV head, the model has {q_heads // shape.kv_heads}"
        )
    sides: dict[str, SideLayout] = {}
    for name, form in policy.sides(layer).items():
        if form.rotation != "none":
            raise ValueError(f"the kernels do not rotate {name}s ({form.rotation})")
        if not form.symmetric:
            raise ValueError(f"the kernels have no zero points of {name}s")
        sides[name] = SideLayout(form.dtype, form.granularity, form.group_size)  # type: ignore[arg-type]  # it checks them
    sinks, recent = policy.sink_tokens, policy.recent_tokens
    return CacheLayout(shape.kv_heads, shape.head_dim, sides["key"], sides["value"], sinks, recent)


def choose_layers(policy: KVPolicy, shape: KVShape, q_heads: int) -> Replaced:
    """Which layers the kernels hold."""
    chosen = Replaced({}, {})
    for layer in range(shape.layers):
        try:
            chosen.layouts[layer] = plugin_layout(policy, shape, layer, q_heads)
        except ValueError as error:
            chosen.native[layer] = str(error)
    return chosen


def use_plugin(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, *, splits: int, sm: int) -> Replaced:
    """Replace the attention of every layer that the kernels hold, in place.

    splits: of a sequence's pages. sm: the GPU's compute capability, 90 say; the kernels are compiled for it.
    """
    replaced = choose_layers(policy, info.shape, info.q_heads)
    for layer, layout in replaced.layouts.items():
        function = layer_function("PagedAttention", layer)
        (node,) = (node for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, function))
        scaling = _scaling(model, function)
        spec = AttentionSpec(policy, info.shape, layer, info.q_heads, scaling, info.compute_dtype, "decode")
        names = dict(zip(["query", "key", "value", *spec.tables, *spec.cache], node.input, strict=True))
        partial = node_of("decode_partial", layout)
        sums = [f"{name}.{layer}" for name in REDUCE.inputs]
        attributes = decode_attributes(layout, splits=splits, scaling=scaling, sm=sm)
        attend = _plugin_node(partial, [names[name] for name in partial.inputs], sums, attributes, layer)
        join = _plugin_node(REDUCE, sums, list(node.output), reduce_attributes(COMPUTE[info.compute_dtype], sm), layer)
        place = list(model.graph.node).index(node)
        model.graph.node.remove(node)
        model.graph.node.insert(place, join)
        model.graph.node.insert(place, attend)
        (body,) = (found for found in model.functions if (found.domain, found.name) == (DOMAIN, function))
        model.functions.remove(body)
    return replaced


def _plugin_node(node: Node, inputs: list[str], outputs: list[str], attributes: dict[str, int], layer: int) -> onnx.NodeProto:
    """The ONNX node that TensorRT's parser makes this plugin of: it looks for name, version and namespace in its registry."""
    found: dict[str, Any] = {"plugin_namespace": NAMESPACE, "plugin_version": PLUGIN_VERSION, **attributes}
    return helper.make_node(node.name, inputs, outputs, name=f"{node.operation}.{layer}", domain=NAMESPACE, **found)


def _scaling(model: onnx.ModelProto, function: str) -> float:
    """What the function body multiplies queries with: the constant of its first product."""
    (body,) = (found for found in model.functions if (found.domain, found.name) == (DOMAIN, function))
    constants = {n.output[0]: n.attribute[0].t for n in body.node if n.op_type == "Constant"}
    product = next(n for n in body.node if n.op_type == "Mul")
    return float(numpy_helper.to_array(constants[product.input[1]]))
