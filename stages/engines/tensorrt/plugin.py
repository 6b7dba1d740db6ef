"""backend=tensorrt: plans with the attention plugin. Two plugin nodes replace every kv.PagedAttention_N of the graphs.

TensorRT does not compile the plugin's kernels: Triton compiles them ahead of time, and the plan contains their PTX. So
the plan needs neither Python nor a plugin library to run.

An ahead-of-time plugin can launch only one kernel. Attention over parts of sequences and the reduction of its partial results
are therefore two plugins, connected by ordinary tensors. A third plugin computes the work list from the lengths, once for all
layers of the decode plan. In the prefill plan, the plugin reads pages in place. (The function body gathers all pages, and
widens the whole pool first if its type is FP8.) Layers with formats that the kernels do not support keep their function body.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from plugins.kv_attention.tensorrt_nodes import CONTEXT_REDUCE, NAMESPACE, PLAN, REDUCE, Node, attributes_of, node_of
from plugins.kv_attention.variants import MAX_BLOCK_ROWS, Setting, context_blocks, context_variant, decode_variant
from stages.engines.base import Mode
from stages.engines.bundle import sm_number
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.functions import AttentionSpec
from stages.engines.paged.kernel_layout import choose_layers
from stages.engines.tensorrt import build
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.arithmetic_onnx import NUMPY_FLOATS, cache_arithmetic, layer_function
from stages.policies.policy import KVPolicy
from stages.policies.spec import ONNX_DOMAIN

PLUGIN_VERSION = "1"
"""Version that TensorRT gives to all quickly deployable plugins."""


def build_bundle(onnx_bundle: Path, out: Path, *, gpu: Mapping[str, str], **arguments: Any) -> None:
    """Write a bundle of plans with the plugin for a GPU. Takes the arguments of `build.build_bundle`."""
    adapt = partial(insert_plugin, sm=sm_number(gpu["compute_cap"]))
    build.build_bundle(onnx_bundle, out, gpu=gpu, adapt=adapt, **arguments)


def insert_plugin(model: onnx.ModelProto, mode: Mode, info: ModelInfo, limits: PlanLimits, *, sm: int) -> dict[int, str]:
    """Put the plugin into the layers that the kernels support, in place; return layer -> reason for the other layers.

    The plugin for chunks expects new tokens in the memory order of the decoder's linear layers (all heads of a token together),
    but the graph orders them by head. Transposes are inserted before the plugin; they cancel out with the decoder's own.
    """
    layers = choose_layers(limits.policy, info.shape, info.q_heads)
    if not layers.layouts:
        return layers.refusals
    register()
    decode = mode == "decode"
    # The kernels multiply queries by the scaling factor in the same arithmetic as the function body.
    scaling = float(NUMPY_FLOATS[cache_arithmetic(info.compute_dtype)](info.scaling))
    settings = {
        # The kernels of several new tokens are compiled for the widest chunk.
        layer: Setting(layout, info.compute_dtype, sm, info.q_heads // info.kv_heads, scaling, MAX_BLOCK_ROWS)
        for layer, layout in layers.layouts.items()
    }
    programs = default_count(mode, list(settings.values()), limits)
    plan = {name: f"{name}.plan" for name in PLAN.outputs} if decode else {}
    for layer, setting in settings.items():
        attributes = attributes_of(setting, programs)
        node, names = _attention(model, info, limits.policy, layer)
        names |= plan
        if decode and not any(call.name == PLAN.operation for call in model.graph.node):
            # The number of exact tokens is the policy's, so the work list is the same in every layer.
            model.graph.node.insert(0, plugin_node(PLAN, [names["lengths"]], list(plan.values()), attributes))
        transposes = []
        for role in () if decode else ("query", "key", "value"):
            by_token = f"{role}.by_token.{layer}"
            transposes.append(helper.make_node("Transpose", [names[role]], [by_token], name=by_token, perm=[0, 2, 1, 3]))
            names[role] = by_token
        attention = node_of("decode_partial" if decode else "context_partial", setting.layout)
        join = REDUCE if decode else CONTEXT_REDUCE
        sums = {name: f"{name}.{layer}" for name in attention.outputs}
        inputs = [names[name] for name in attention.inputs]
        attend = plugin_node(attention, inputs, list(sums.values()), attributes, layer)
        parts = [(names | sums)[name] for name in join.inputs]
        reduce = plugin_node(join, parts, list(node.output), attributes, layer)
        _replace(model, node, [*transposes, attend, reduce])
    return layers.refusals


def register() -> None:
    """Register the plugin's operations with TensorRT by an import, which runs once per process: TensorRT refuses duplicates."""
    import plugins.kv_attention.tensorrt_plugin  # noqa: F401


def default_count(mode: Mode, settings: Sequence[Setting], limits: PlanLimits) -> int:
    """Return the number of programs (decode) or of splits (prefill) that fill this GPU, the minimum over all settings.

    The programs of a decode step divide the pages of a KV head among themselves. The splits of a prefill divide the pages of a
    sequence, and their number is chosen for a chunk of the largest size.
    """
    import torch

    from plugins.kv_attention import launch

    pages, kv_heads, sm_count = limits.sequence_pages, settings[0].layout.kv_heads, launch.sm_count(torch.device("cuda"))
    if mode == "decode":
        resident = min(decode_variant(setting).resident for setting in settings)
        return launch.choose_programs(limits.max_batch, kv_heads, pages, sm_count=sm_count, resident=resident)
    splits = []
    for variant in map(context_variant, settings):
        blocks = context_blocks(limits.chunk, variant)
        splits.append(launch.choose_splits(blocks, kv_heads, pages, sm_count * variant.resident))
    return min(splits)


def _attention(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, layer: int) -> tuple[onnx.NodeProto, dict[str, str]]:
    """Return a layer's attention node, and input name of its function -> tensor name in the graph."""
    function = layer_function("PagedAttention", layer)
    (node,) = (node for node in model.graph.node if (node.domain, node.op_type) == (ONNX_DOMAIN, function))
    spec = AttentionSpec(info, policy, layer)
    return node, dict(zip(["query", "key", "value", *spec.tables, *spec.cache], node.input, strict=True))


def _replace(model: onnx.ModelProto, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> None:
    position = list(model.graph.node).index(node)
    (body,) = (body for body in model.functions if (body.domain, body.name) == (node.domain, node.op_type))
    model.graph.node.remove(node)
    for new in reversed(nodes):
        model.graph.node.insert(position, new)
    model.functions.remove(body)


def plugin_node(
    node: Node, inputs: list[str], outputs: list[str], attributes: dict[str, int | float], part: int | str | None = None
) -> onnx.NodeProto:
    """Return the ONNX node of a plugin. TensorRT's parser looks up its name, version and namespace in the plugin registry."""
    name = node.operation if part is None else f"{node.operation}.{part}"
    fields: dict[str, Any] = {"plugin_namespace": NAMESPACE, "plugin_version": PLUGIN_VERSION, **attributes}
    return helper.make_node(node.name, inputs, outputs, name=name, domain=NAMESPACE, **fields)
