"""Replaces each function kv.PagedAttention_N that the compiled kernel supports by one custom operator.

Only the session's copy in memory changes; the graph on disk keeps its function bodies for other runtimes. ONNX Runtime would
prefer a registered operator to a function of the same name, but every layer's function has a different name (for TensorRT), and
the operator needs the layer's layout as attributes.
"""

from typing import Any

import onnx
from onnx import helper

from stages.core.errors import UserError
from stages.engines.onnx.bundle import GRAPH, ModelInfo
from stages.engines.onnx.formats import SideCodec
from stages.engines.onnx.functions import AttentionSpec
from stages.policies.arithmetic_onnx import FLOAT_TYPES, NUMPY_FLOATS, layer_function
from stages.policies.policy import KVPolicy, Side
from stages.policies.spec import ONNX_DOMAIN
from stages.policies.table import FP16

NATIVE_DOMAIN = "kvgate.native"

OPERATORS = {"float32": "PagedAttention", "float16": "PagedAttentionHalf"}

LANES = 16
"""Channels of a vector. head_dim must be a multiple of LANES times the number of codes per byte."""

TABLES = ("page_table", "lengths", "window_base_table", "window_table", "window_starts", "exact_slots", "sinks")
ABSENT = -1
"""Index that marks an absent optional input."""


def refusals(info: ModelInfo, policy: KVPolicy) -> dict[int, str]:
    """Return layer -> reason for the layers that the kernel does not support."""
    specs = (AttentionSpec(info, policy, layer) for layer in range(info.layers))
    return {spec.layer: reason for spec in specs if (reason := _refusal(spec)) is not None}


def use_kernel(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy) -> None:
    """Replace attention by the kernel's operator in every layer that the kernel supports, in place.

    Raises UserError if the graph does not match the model and policy.
    """
    refused = refusals(info, policy)
    if NATIVE_DOMAIN.encode() in model.SerializeToString():
        # The kernel trusts the attributes of its operators, so only this function may write them.
        raise UserError(f"{GRAPH}: holds a node of the reserved domain {NATIVE_DOMAIN}; build the engine again")
    nodes = {node.op_type: node for node in model.graph.node if node.domain == ONNX_DOMAIN}
    bodies = {body.name: body for body in model.functions}
    for layer in range(info.layers):
        if layer in refused:
            continue
        function = layer_function("PagedAttention", layer)
        spec = AttentionSpec(info, policy, layer)
        node, body = nodes.get(function), bodies.get(function)
        if node is None or body is None or len(node.input) != len(spec.inputs) or len(node.output) != 1:
            raise UserError(f"{GRAPH}: {function} is not the attention of the bundle's policy: build the engine again")
        (result,) = node.output
        fields = attributes(spec)
        name = OPERATORS[info.compute_dtype]
        node.CopyFrom(helper.make_node(name, list(node.input), [result], name=node.name, domain=NATIVE_DOMAIN, **fields))
        model.functions.remove(body)
        dims: list[int | str] = ["B", "S", info.q_heads, info.head_dim]
        model.graph.value_info.append(helper.make_tensor_value_info(result, FLOAT_TYPES[info.compute_dtype], dims))
    model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))


def _refusal(spec: AttentionSpec) -> str | None:
    for side, codec in spec.sides.items():
        form = codec.form
        if form.code.native[not form.symmetric] is None:
            return f"{spec.policy.format_key(side, spec.layer)}.dtype={form.dtype} is not supported by the kernel"
        step = LANES * form.code.packed
        if codec.head_dim % step:
            return f"head_dim {codec.head_dim} is not a multiple of {step}, which the kernel needs for {form.dtype}"
    return None


def attributes(spec: AttentionSpec) -> dict[str, Any]:
    """Return the operator's attributes in the format that `create` in operator.c reads."""
    index = {name: number for number, name in enumerate(spec.inputs)}
    info, policy, eviction = spec.info, spec.policy, spec.policy.eviction
    gap = (0, 0) if eviction is None or not eviction.gap else (eviction.gap.start, eviction.gap_length)
    exact = (FP16.native[0], 0, 0, 0, 1, 1, 0)
    sides: dict[Side, list[int | None]] = {side: [ABSENT] * 8 for side in Side}
    for side, codec in spec.sides.items():
        sides[side] = [*_side(codec), index[next(iter(codec.arrays))]]
    # The function body multiplies queries with the scaling in the compute dtype.
    scaling = float(NUMPY_FLOATS[info.compute_dtype](info.scaling))
    return {
        "scaling": scaling,
        "softcap": info.softcap or 0.0,
        "sizes": [info.head_dim, spec.group, info.kv_heads, policy.sink_tokens, policy.recent_tokens, spec.window or 0, *gap],
        "tables": [index.get(name, ABSENT) for name in TABLES],
        **{str(side): numbers for side, numbers in sides.items()},
        **{name: [*exact, index.get(name, ABSENT)] for name in ("key_exact", "value_exact")},
    }


def _side(codec: SideCodec) -> tuple[int | None, ...]:
    """Return a side's attributes: kind, groups, asymmetric, static, heads and channels of a static scale, rotated."""
    form = codec.form
    _, heads, _, channels = next(iter(codec.constants.values()), (1, 1, 1, 1))
    return (
        form.code.native[not form.symmetric],
        codec.groups,
        int(not form.symmetric),
        int(form.has_static_scales),
        heads,
        channels,
        int(form.rotation != "none"),
    )
