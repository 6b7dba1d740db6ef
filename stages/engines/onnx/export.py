"""Exports a Hugging Face checkpoint as a decoder skeleton: ONNX with one placeholder node of domain `kv` per attention layer.

The skeleton does not depend on the KV policy, so one export (seconds of torch.export) serves every policy.
stages.engines.onnx.build replaces the placeholders by attention over a quantized cache.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.helper import get_node_attr_value
from transformers import AttentionInterface, AttentionMaskInterface

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm
from stages.core.digest import file_digest
from stages.core.memory import collect_memory
from stages.core.records import Progress
from stages.engines.bundle import copy_tokenizer
from stages.engines.onnx.bundle import SKELETON_NODE, WEIGHTS_FILE, ModelInfo
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.weights import store_weights
from stages.engines.reference.model import head, no_mask, options_of
from stages.policies.spec import ONNX_DOMAIN

_ATTENTION = "kvgate_skeleton"


def export_decoder(checkpoint: Path, out: Path, *, compute_dtype: ComputeDType, progress: Progress) -> None:
    """Write `decoder.onnx`, `weights.bin`, `model.json` and the tokenizer's files to the empty directory `out`.

    Graph: input_ids, position_ids (B, S) and last (B,) int64 -> logits (B, vocab_size) of every sequence's row `last`.
    Every layer has a node kv.Attention(query (B, Hq, S, D), key, value (B, H, S, D)) -> (B, S, Hq, D). A fourth input holds
    the learned sinks (Hq,), if the model has sinks. Attributes: `layer`, `scaling`, `window` (number of latest tokens that the
    layer attends to, 0 for all) and `softcap` (0 for none). `weights.bin` may store the weights in fewer bits than
    `compute_dtype`. Raises UserError if inspect_checkpoint refuses the checkpoint.
    """
    info = inspect_checkpoint(checkpoint)
    _translate(checkpoint, out / "decoder.onnx", compute_dtype, progress)
    collect_memory()  # the model and its trace
    progress("writing weights", 0, 1)
    graph = _write_graph(out)
    nodes = [node for node in graph.node if (node.domain, node.op_type) == (ONNX_DOMAIN, SKELETON_NODE)]
    windows = {get_node_attr_value(node, "layer"): get_node_attr_value(node, "window") or None for node in nodes}
    assert windows == {n: info.shape.window(n) for n in range(info.shape.layers)}, "transformers reads the same windows"
    (out / "model.json").write_text(_describe(info, out, compute_dtype, nodes).model_dump_json(indent=1) + "\n")
    copy_tokenizer(checkpoint, out)


def _attention_node(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface as one symbolic node of shape (B, S, Hq, D)."""
    features = options_of(module, key.shape[1], options)
    batch, heads, length, head_dim = query.shape
    layer: Any = module.layer_idx
    attributes: Any = {"layer": int(layer), "scaling": float(scaling), "window": int(features.window or 0)}
    attributes["softcap"] = float(features.softcap or 0)
    node = torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::{SKELETON_NODE}",
        (query, key, value) if features.sinks is None else (query, key, value, features.sinks.flatten()),
        attributes,
        dtype=query.dtype,
        shape=(batch, length, heads, head_dim),
        version=1,
    )
    return node, None


class _Decoder(torch.nn.Module):
    """The decoder, with logits of only one row per sequence: lm_head over all rows would dominate a small model's prefill."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        index = last.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        return head(self.model, hidden.gather(1, index)).squeeze(1)


def _translate(checkpoint: Path, graph: Path, compute_dtype: ComputeDType, progress: Progress) -> None:
    progress("loading the checkpoint", 0, 1)
    model = load_causal_lm(checkpoint, dtype=getattr(torch, compute_dtype))
    model.eval()
    progress("tracing", 0, 1)
    AttentionInterface.register(_ATTENTION, _attention_node)
    AttentionMaskInterface.register(_ATTENTION, no_mask)
    model.config._attn_implementation = _ATTENTION
    model.config._experts_implementation = "batched_mm"  # a loop over the chosen experts cannot be traced
    batch, length = torch.export.Dim("B", min=1), torch.export.Dim("S", min=1)
    # Sizes 2 and 3, because torch.export would treat a size of 1 as a constant.
    example = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    rows = {0: batch, 1: length}
    shapes = {"input_ids": rows, "position_ids": rows, "last": {0: batch}}
    # Hides warnings about torchvision's operators, which are not registered, and about deprecations inside torch.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(_Decoder(model), example, dynamic_shapes=shapes, strict=False)
        progress("translating to ONNX", 0, 1)
        program = torch.onnx.export(exported, dynamo=True, output_names=["logits"], verbose=False)
    assert program is not None
    program.save(graph, external_data=True)
    # The exporter keeps the graph until the process ends, so free its folded weights and the model's weights.
    for value in program.model.graph.initializers.values():
        value.const_value = None
    for parameter in model.parameters():
        parameter.data = torch.empty(0)


def _write_graph(out: Path) -> onnx.GraphProto:
    graph = out / "decoder.onnx"
    model = onnx.load(graph, load_external_data=False)
    store_weights(model.graph, out / "decoder.onnx.data", out)
    # Stack traces and local paths would make the digest differ between machines.
    for node in model.graph.node:
        del node.metadata_props[:]
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        del value.metadata_props[:]
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    del model.graph.metadata_props[:], model.metadata_props[:]
    _restore_division(model.graph)
    onnx.save(model, graph)
    return model.graph


def _restore_division(graph: onnx.GraphProto) -> None:
    """Replace x * Reciprocal(y) by x / y, in place, so that ONNX Runtime recognizes RMSNorm and runs it as one node.

    A product of two reciprocals stays as it is.
    """
    reciprocals = {node.output[0]: node for node in graph.node if node.op_type == "Reciprocal"}
    for node in graph.node:
        others = [name for name in node.input if name not in reciprocals]
        if node.op_type == "Mul" and len(others) == 1:
            (factor,) = (name for name in node.input if name in reciprocals)
            node.op_type = "Div"
            node.input[:] = [*others, reciprocals[factor].input[0]]
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for output, node in reciprocals.items():
        if output not in used:
            graph.node.remove(node)


def _describe(info: CheckpointInfo, out: Path, compute_dtype: ComputeDType, nodes: list[onnx.NodeProto]) -> ModelInfo:
    """Return the model's description. In the supported families, layers differ only in their windows."""
    ((scaling, softcap, sinks),) = {
        (get_node_attr_value(node, "scaling"), get_node_attr_value(node, "softcap"), len(node.input) > 3) for node in nodes
    }
    return ModelInfo(
        compute_dtype=compute_dtype,
        layers=info.shape.layers,
        q_heads=info.q_heads,
        kv_heads=info.shape.kv_heads,
        head_dim=info.shape.head_dim,
        vocab_size=info.vocab_size,
        max_position_embeddings=info.max_positions,
        weights_sha256=file_digest(out / WEIGHTS_FILE),
        scaling=scaling,
        windows=info.shape.windows,
        softcap=softcap or None,
        sinks=sinks,
    )
