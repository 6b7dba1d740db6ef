"""A decoder skeleton and a KV policy to an engine bundle: graph surgery, no torch, a fraction of a second.

Every skeleton attention node becomes kv.PagedAttention over the cache's inputs, and kv.QuantizeKey and kv.QuantizeValue
make the new tokens' codes, which are outputs: the graph is pure, the runner writes them into the pools.
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pipeline.checkpoint import TOKENIZER_FILES
from pipeline.digest import file_digest
from pipeline.kv import PAGE_TOKENS, POLICY_FILE, SCALES_FILE, KVPolicy, KVScales
from pipeline.records import Progress
from stages.files import link_or_copy
from stages.onnx.bundle import (
    BACKEND,
    GRAPHS,
    SKELETON_NODE,
    WEIGHTS_FILE,
    Bundle,
    ModelInfo,
    Tensor,
    read_record,
    read_scales,
    write_bundle,
)
from stages.onnx.formats import SCALE_STORAGE, Side
from stages.onnx.functions import AttentionSpec, Mode, attention_function, quantize_function
from stages.onnx.graph import DOMAIN, OPSET, layer_function

IR_VERSION = 10
INT32, FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT


def build_bundle(decoder: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Fill the empty directory `out` with an engine bundle for `policy`.

    `decoder` is what export_decoder wrote, `scales` a kv_scales.json. Raises UserError when the policy does not fit the
    model or the scales do not fit the policy.
    """
    info = read_record(decoder / "model.json", ModelInfo)
    policy.check_shape(info.shape)
    static = read_scales(scales, policy, info.layers)
    (out / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n")
    (out / SCALES_FILE).write_text(static.model_dump_json(indent=1) + "\n")
    link_or_copy(decoder / WEIGHTS_FILE, out / WEIGHTS_FILE)
    for name in TOKENIZER_FILES:
        if (decoder / name).is_file():
            shutil.copyfile(decoder / name, out / name)
    modes: tuple[Mode, ...] = ("prefill", "decode")
    for done, (mode, name) in enumerate(zip(modes, GRAPHS, strict=True)):
        progress("build", done, len(GRAPHS))
        model = onnx.load(decoder / "decoder.onnx", load_external_data=False)
        _specialise(model, info, policy, static, mode)
        onnx.save(model, out / name)
        _check(model)
    digests = {name: file_digest(out / name) for name in (*GRAPHS, POLICY_FILE, SCALES_FILE)}
    bundle = Bundle(
        backend=BACKEND,
        graph_digest=digests["decode.onnx"],
        model=info,
        inputs=[_tensor(value) for value in model.graph.input],
        outputs=[_tensor(value) for value in model.graph.output],
        files={**digests, WEIGHTS_FILE: info.weights_sha256},
    )
    write_bundle(out, bundle)
    progress("build", len(GRAPHS), len(GRAPHS))


def _check(model: onnx.ModelProto) -> None:
    """onnx.checker on the graph. It refuses hard-linked external data, so weights become inputs in the checked copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            copy.graph.initializer.append(tensor)
    onnx.checker.check_model(copy)


def _specialise(model: onnx.ModelProto, info: ModelInfo, policy: KVPolicy, static: KVScales, mode: Mode) -> None:
    """Turn the skeleton into the prefill or the decode graph, in place."""
    graph = model.graph
    nodes = {_attribute(n, "layer").i: n for n in graph.node if (n.domain, n.op_type) == (DOMAIN, SKELETON_NODE)}
    assert sorted(nodes) == list(range(info.layers)), "the skeleton has one attention node per layer"
    scalings = {_attribute(node, "scaling").f for node in nodes.values()}
    assert len(scalings) == 1, "one attention scaling for all layers"
    spec = AttentionSpec(policy, info.shape, info.q_heads, scalings.pop(), info.compute_dtype, mode)
    sides = {"key": spec.key, "value": spec.value}

    length: int | str = 1 if mode == "decode" else "S"
    _rename_dims(graph, length)
    graph.input.append(helper.make_tensor_value_info("page_table", INT32, ["B", "P"]))
    graph.input.append(helper.make_tensor_value_info("lengths", INT32, ["B"]))
    if policy.exact_tokens:
        graph.input.append(helper.make_tensor_value_info("exact_slots", INT32, ["B"]))
    for layer, node in nodes.items():
        for name, side in sides.items():
            graph.input.extend(_cache_inputs(name, side, layer, policy.exact_tokens))
            values = getattr(static, name)
            if values is not None:
                # The writer's own copy: the reader's scale is an input (the canary corrupts what reading uses).
                scale = np.array([values[layer]], np.float32)
                graph.initializer.append(numpy_helper.from_array(scale, f"{name}_write_scale.{layer}"))
        _replace(node, spec, layer)
    for layer, node in nodes.items():
        for position, (name, side) in enumerate(sides.items(), start=1):
            source = str(node.input[position])
            _append_quantize(graph, name=name, side=side, layer=layer, source=source, length=length)
            if policy.exact_tokens:
                # The runner keeps these float16 copies of the sinks and the recent window.
                exact = f"{name}_new.{layer}"
                dims: list[int | str] = ["B", side.kv_heads, length, side.head_dim]
                graph.node.append(helper.make_node("Cast", [source], [exact], to=onnx.TensorProto.FLOAT16))
                graph.output.append(helper.make_tensor_value_info(exact, onnx.TensorProto.FLOAT16, dims))
    for layer in nodes:
        model.functions.append(attention_function(spec, layer))
        for name, side in sides.items():
            model.functions.append(quantize_function(f"Quantize{name.capitalize()}", layer, side, info.compute_dtype))
    for imported in model.opset_import:
        if imported.domain == "":
            imported.version = OPSET
    model.ir_version = IR_VERSION


def _rename_dims(graph: onnx.GraphProto, length: int | str) -> None:
    """Name the dynamic dimensions B and S and fix S where it is known; stale inferred shapes are dropped."""
    del graph.value_info[:]
    names: list[int | str] = ["B", length]
    for value in [*graph.input, *graph.output]:
        wanted: list[int | str] = names if value.name in ("input_ids", "position_ids") else ["B"]
        for dim, name in zip(value.type.tensor_type.shape.dim, wanted, strict=False):
            if isinstance(name, int):
                dim.dim_value = name
            else:
                dim.dim_param = name


def _cache_inputs(name: str, side: Side, layer: int, exact_tokens: int) -> list[onnx.ValueInfoProto]:
    """Graph inputs of one side of one layer's cache. N pages, M exact buffers."""
    pool: list[int | str] = ["N", side.kv_heads, PAGE_TOKENS, side.width]
    inputs = [helper.make_tensor_value_info(f"{name}_pool.{layer}", side.storage.onnx_type, pool)]
    if side.form.static:
        inputs.append(helper.make_tensor_value_info(f"{name}_scale.{layer}", FLOAT, [1]))
    elif side.groups:
        dims: list[int | str] = ["N", side.kv_heads, PAGE_TOKENS, side.groups]
        inputs.append(helper.make_tensor_value_info(f"{name}_scale_pool.{layer}", SCALE_STORAGE.onnx_type, dims))
    if exact_tokens:
        buffer: list[int | str] = ["M", side.kv_heads, exact_tokens, side.head_dim]
        inputs.append(helper.make_tensor_value_info(f"{name}_exact.{layer}", onnx.TensorProto.FLOAT16, buffer))
    return inputs


def _replace(node: onnx.NodeProto, spec: AttentionSpec, layer: int) -> None:
    """Make a skeleton node the paged attention of its layer."""
    query, key, value = node.input
    shared = ("page_table", "lengths", "exact_slots")
    cache = [name if name in shared else f"{name}.{layer}" for name in spec.inputs[3:]]
    function = layer_function("PagedAttention", layer)
    paged = helper.make_node(function, [query, key, value, *cache], list(node.output), name=f"attention.{layer}", domain=DOMAIN)
    node.CopyFrom(paged)


def _append_quantize(graph: onnx.GraphProto, *, name: str, side: Side, layer: int, source: str, length: int | str) -> None:
    """Codes and stored scales of the new tokens of one side of one layer, as outputs."""
    inputs = [source, f"{name}_write_scale.{layer}"] if side.form.static else [source]
    outputs = [(f"{name}_codes.{layer}", side.storage.onnx_type, side.width)]
    if side.groups:
        outputs.append((f"{name}_code_scales.{layer}", SCALE_STORAGE.onnx_type, side.groups))
    function = layer_function(f"Quantize{name.capitalize()}", layer)
    names = [output for output, _, _ in outputs]
    graph.node.append(helper.make_node(function, inputs, names, name=f"quantize_{name}.{layer}", domain=DOMAIN))
    for output, dtype, width in outputs:
        graph.output.append(helper.make_tensor_value_info(output, dtype, ["B", side.kv_heads, length, width]))


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    found: onnx.AttributeProto = next(attribute for attribute in node.attribute if attribute.name == name)
    return found


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    kind = value.type.tensor_type
    dims: list[int | str] = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
    return Tensor(name=value.name, dtype=onnx.TensorProto.DataType.Name(kind.elem_type).lower(), shape=dims)
