"""Builds an engine bundle from a decoder skeleton and a KV policy, without torch, in a fraction of a second.

Every placeholder node of the skeleton becomes kv.PagedAttention over the cache's inputs, and kv.Quantize<Side> quantizes the
new tokens. The codes are outputs named `new_<array>`. The graph has no side effects: the engine writes the codes into pools.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stages.core.digest import file_digest
from stages.core.files import link_or_copy
from stages.core.records import Progress
from stages.engines.bundle import begin_bundle, read_record, write_bundle
from stages.engines.onnx.bundle import BACKEND, GRAPH, NOT_FINITE, SKELETON_NODE, WEIGHTS_FILE, Bundle, ModelInfo
from stages.engines.onnx.formats import SideCodec
from stages.engines.onnx.functions import AttentionSpec, attention_function, quantize_function, quantize_name
from stages.policies.arithmetic_onnx import FLOAT_TYPES, NUMPY_FLOATS, OPSET, cache_arithmetic, layer_function, onnx_type
from stages.policies.policy import PAGE_TOKENS, POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE, KVScales
from stages.policies.spec import FLOAT16, ONNX_DOMAIN

IR_VERSION = 10
INT32, FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT

Dims = list[int | str]
"""Dimensions: B sequences, S new tokens, N pages of a pool, NW pages of a window pool, M exact buffers."""


def specialise(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, static: KVScales) -> None:
    """Turn the skeleton, decoder.onnx of export_decoder, into the graph of a policy, in place."""
    graph = model.graph
    skeleton = [node for node in graph.node if (node.domain, node.op_type) == (ONNX_DOMAIN, SKELETON_NODE)]
    nodes = {helper.get_node_attr_value(node, "layer"): node for node in skeleton}
    assert sorted(nodes) == list(range(info.layers)), "the skeleton has one attention node per layer"
    specs = {layer: AttentionSpec(info, policy, layer) for layer in range(info.layers)}
    _rename_dims(graph)
    for name, table in specs[0].tables.items():
        graph.input.append(helper.make_tensor_value_info(name, INT32, table))
    sources: list[str] = []
    for layer, spec in specs.items():
        query, key, value, *sinks = nodes[layer].input
        sources += [key, value]
        graph.input.extend(cache_inputs(spec, f".{layer}"))
        for codec in spec.sides.values():
            # Quantization's scales are constants and attention's are inputs: the must-fail control corrupts only the inputs.
            parameters = codec.constant_values(static, layer).items()
            graph.initializer.extend(numpy_helper.from_array(values, f"write_{name}.{layer}") for name, values in parameters)
        attention = helper.make_node(
            layer_function("PagedAttention", layer),
            [query, key, value, *sinks, *spec.tables, *(f"{name}.{layer}" for name in spec.cache)],
            list(nodes[layer].output),
            name=f"attention.{layer}",
            domain=ONNX_DOMAIN,
        )
        nodes[layer].CopyFrom(attention)
        for codec in spec.sides.values():
            source = key if codec.side.is_key else value
            _append_quantize(graph, codec, layer, source)
            model.functions.append(quantize_function(layer, codec, info.compute_dtype))
        if policy.exact_tokens:
            for name, source in (("key_exact", key), ("value_exact", value)):
                copy = f"new_{name}.{layer}"
                graph.node.append(helper.make_node("Cast", [source], [copy], to=onnx_type(FLOAT16)))
                new: Dims = ["B", info.kv_heads, "S", info.head_dim]
                graph.output.append(helper.make_tensor_value_info(copy, onnx_type(FLOAT16), new))
        model.functions.append(attention_function(spec))
    _append_check(graph, info, sources)
    for imported in model.opset_import:
        if imported.domain == "":
            imported.version = OPSET
    model.ir_version = IR_VERSION


def _rename_dims(graph: onnx.GraphProto) -> None:
    """Name the dynamic dimensions B and S, and remove the inferred shapes, which are stale."""
    del graph.value_info[:]
    for value in [*graph.input, *graph.output]:
        names = ("B", "S") if value.name in ("input_ids", "position_ids") else ("B",)
        for dim, name in zip(value.type.tensor_type.shape.dim, names, strict=False):
            dim.dim_param = name


def cache_inputs(spec: AttentionSpec, suffix: str) -> list[onnx.ValueInfoProto]:
    """Return the pools, static parameters and exact buffers that a layer's attention reads; their names end in `suffix`."""
    inputs: list[onnx.ValueInfoProto] = []
    for codec in spec.sides.values():
        pages = "NW" if codec.side.in_window else "N"
        for name, (storage, width) in codec.arrays.items():
            dims: Dims = [pages, codec.kv_heads, PAGE_TOKENS, width]
            inputs.append(helper.make_tensor_value_info(name + suffix, onnx_type(storage), dims))
        inputs += [helper.make_tensor_value_info(name + suffix, FLOAT, dims) for name, dims in codec.constants.items()]
    buffers: Dims = ["M", spec.info.kv_heads, spec.policy.exact_tokens, spec.info.head_dim]
    exact = [name for name in spec.cache if name.endswith("_exact")]
    return inputs + [helper.make_tensor_value_info(name + suffix, onnx_type(FLOAT16), buffers) for name in exact]


def _append_quantize(graph: onnx.GraphProto, codec: SideCodec, layer: int, source: str) -> None:
    """Append a node that quantizes one side's new tokens in one layer. Its results become outputs of the graph."""
    function = layer_function(quantize_name(codec.side), layer)
    inputs = [source, *(f"write_{name}.{layer}" for name in codec.constants)]
    outputs = [f"new_{name}.{layer}" for name in codec.arrays]
    graph.node.append(helper.make_node(function, inputs, outputs, name=f"quantize_{codec.side}.{layer}", domain=ONNX_DOMAIN))
    for output, (storage, width) in zip(outputs, codec.arrays.values(), strict=True):
        dims: Dims = ["B", codec.kv_heads, "S", width]
        graph.output.append(helper.make_tensor_value_info(output, onnx_type(storage), dims))


def _append_check(graph: onnx.GraphProto, info: ModelInfo, sources: list[str]) -> None:
    """Append the output NOT_FINITE for the new keys and values `sources`: the sum of 0 * x, which is NaN unless x is finite."""
    compute = cache_arithmetic(info.compute_dtype)
    dtype = NUMPY_FLOATS[compute]
    graph.node.append(helper.make_node("Concat", sources, ["new_states"], axis=1))
    graph.node.append(helper.make_node("Cast", ["new_states"], ["half_states"], to=onnx_type(FLOAT16)))
    graph.node.append(helper.make_node("Cast", ["half_states"], ["checked_states"], to=FLOAT_TYPES[compute]))
    graph.initializer.append(numpy_helper.from_array(np.zeros((info.head_dim, 1), dtype), "zeros"))
    graph.node.append(helper.make_node("MatMul", ["checked_states", "zeros"], [NOT_FINITE]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    dims: Dims = ["B", len(sources) * info.kv_heads, "S", 1]
    graph.output.append(helper.make_tensor_value_info(NOT_FINITE, kind, dims))


def build_bundle(decoder: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Write an engine bundle of `decoder`, a directory of export_decoder, to the empty directory `out`.

    `scales` is a kv_scales.json. Raises UserError if the policy does not fit the model, or the scales do not fit the policy.
    """
    info = read_record(decoder / "model.json", ModelInfo)
    policy.check_shape(info.shape)
    static = begin_bundle(decoder, out, policy, scales, info.shape)
    link_or_copy(decoder / WEIGHTS_FILE, out / WEIGHTS_FILE)
    progress("build", 0, 1)
    model = onnx.load(decoder / "decoder.onnx", load_external_data=False)
    specialise(model, info, policy, static)
    onnx.save(model, out / GRAPH)
    digests = {name: file_digest(out / name) for name in (GRAPH, POLICY_FILE, SCALES_FILE)}
    write_bundle(out, Bundle(backend=BACKEND, model=info, files={**digests, WEIGHTS_FILE: info.weights_sha256}))
    progress("build", 1, 1)
