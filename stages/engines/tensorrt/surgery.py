"""A decode graph whose attention over the cache is the plugin's: kv.PagedAttention_N becomes two plugin nodes.

The split attention and the reduction of its splits are two plugins, because an ahead-of-time plugin launches one kernel; the
partial sums between them are ordinary tensors. Layers whose formats the kernels do not hold keep their function body.
"""

from typing import Any

import onnx
from onnx import helper

from pipeline.core.kv import KVPolicy
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
from stages.engines.onnx.graph import DOMAIN, NUMPY_FLOATS, layer_function
from stages.engines.paged.kernel_layout import KernelLayers, choose_layers

PLUGIN_VERSION = "1"
"""Version of every quickly deployable plugin."""

COMPUTE: dict[str, Compute] = {"float32": "fp32", "float16": "fp16"}


def use_plugin(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, *, splits: int, sm: int) -> KernelLayers:
    """Replace the attention of every layer that the kernels hold, in place.

    Args:
        model: The decode graph of a bundle.
        info: The bundle's model, with the attention's scaling.
        policy: The bundle's policy.
        splits: Parts that a sequence's pages are split into.
        sm: Compute capability of the GPU that the kernels are compiled for, 90 say.

    Returns:
        The layers that were replaced, and why the others were not.
    """
    layers = choose_layers(policy, info.shape, info.q_heads)
    assert info.scaling is not None, "write_plugin_graph refuses bundles without it"
    # The function body multiplies queries with the scaling in the compute dtype, and so do the kernels.
    scaling = float(NUMPY_FLOATS[info.compute_dtype](info.scaling))
    for layer, layout in layers.layouts.items():
        function = layer_function("PagedAttention", layer)
        (node,) = (node for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, function))
        spec = AttentionSpec(policy, info.shape, layer, info.q_heads, scaling, info.compute_dtype, "decode")
        names = dict(zip(["query", "key", "value", *spec.tables, *spec.cache], node.input, strict=True))
        partial = node_of("decode_partial", layout)
        sums = [f"{name}.{layer}" for name in REDUCE.inputs]
        attributes = decode_attributes(layout, splits=splits, scaling=scaling, sm=sm)
        attend = _plugin_node(partial, [names[name] for name in partial.inputs], sums, attributes, layer)
        join = _plugin_node(REDUCE, sums, list(node.output), reduce_attributes(COMPUTE[info.compute_dtype], sm), layer)
        position = list(model.graph.node).index(node)
        model.graph.node.remove(node)
        model.graph.node.insert(position, join)
        model.graph.node.insert(position, attend)
        (body,) = (body for body in model.functions if (body.domain, body.name) == (DOMAIN, function))
        model.functions.remove(body)
    return layers


def _plugin_node(node: Node, inputs: list[str], outputs: list[str], attributes: dict[str, int], layer: int) -> onnx.NodeProto:
    """The ONNX node of a plugin, whose name, version and namespace TensorRT's parser looks for in its registry."""
    fields: dict[str, Any] = {"plugin_namespace": NAMESPACE, "plugin_version": PLUGIN_VERSION, **attributes}
    return helper.make_node(node.name, inputs, outputs, name=f"{node.operation}.{layer}", domain=NAMESPACE, **fields)
