"""Splits ModelOpt's export of a TensorRT-LLM checkpoint over ranks, and plants the must-fail control's fault in a copy.

Names: transformer.layers.N.{attention.qkv, attention.dense, mlp.fc, mlp.gate, mlp.proj}.{weight, *scaling_factor}. qkv stacks
the rows of q, k and v. fc is Hugging Face's gate_proj, and gate is its up_proj.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.checkpoints.files import read_json
from stages.engines.interpreter.bundle import copy_linking_weights

CONFIG_FILE = "config.json"
KV_SCALE = ".kv_cache_scaling_factor"
KV_RECIPROCAL = ".kv_cache_rcp_scaling_factor"
KV_SIDES = (".k_cache_scaling_factor", ".v_cache_scaling_factor")
"""Optional separate scales. TensorRT-LLM uses the larger one for both sides, and computes a missing reciprocal from the scale
(tensorrt_llm/models/modeling_utils.py, preprocess_weights)."""

BY_HEADS = ("attention.qkv.weight", "attention.qkv.bias")
BY_ROWS = ("mlp.fc.weight", "mlp.gate.weight", "mlp.fc.bias", "mlp.gate.bias", "lm_head.weight")
BY_COLUMNS = ("attention.dense.weight", "mlp.proj.weight")
ADDED_ONCE = ("attention.dense.bias", "mlp.proj.bias")
"""Biases that are added after the ranks' results are summed: rank 0 has the bias, other ranks have zeros."""


def write_checkpoint(source: Path, out: Path, ranks: int) -> None:
    """Split `source`, ModelOpt's export for one rank, over `ranks` ranks; write the result to the new directory `out`."""
    if ranks == 1:
        copy_linking_weights(sorted(path.name for path in source.iterdir()), source, out)
        return
    out.mkdir()
    config = read_json(source, CONFIG_FILE)
    config["mapping"] = {"world_size": ranks, "tp_size": ranks, "pp_size": 1}
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    tensors = load_file(source / "rank0.safetensors")
    for rank in range(ranks):
        part = {name: shard(name, tensor, config, rank, ranks).clone() for name, tensor in tensors.items()}
        save_file(part, out / f"rank{rank}.safetensors")


def shard(name: str, tensor: Tensor, config: dict[str, Any], rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a tensor. Per-tensor scales and normalization weights are the same on every rank.

    Supports floating-point weights and FP8 weights with one scale per tensor. For these the parts equal ModelOpt 0.47's own
    export for several ranks, byte for byte.
    """
    if name.endswith(ADDED_ONCE) and rank > 0:
        return torch.zeros_like(tensor)
    if name.endswith(BY_HEADS):
        queries, heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]
        parts = tensor.tensor_split((queries * size, (queries + heads) * size))
        return torch.cat([part.chunk(ranks)[rank] for part in parts])
    sharded_embedding = config["use_parallel_embedding"] and name.endswith("vocab_embedding.weight")
    if name.endswith(BY_ROWS) or (sharded_embedding and config["embedding_sharding_dim"] == 0):
        return tensor.chunk(ranks)[rank]
    if name.endswith(BY_COLUMNS) or sharded_embedding:
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor


def kv_scales(checkpoint: Path) -> list[float]:
    """Return the cache's scale per layer, shared by keys and values; empty if the cache is not quantized."""
    tensors = load_file(checkpoint / "rank0.safetensors")
    scales = {name: tensor.item() for name, tensor in tensors.items() if name.endswith(KV_SCALE)}
    return [scales[name] for name in sorted(scales, key=lambda name: int(name.split(".")[2]))]


def write_faulted(source: Path, out: Path, factor: float) -> None:
    """Write a copy of the checkpoint to the new directory `out`, with the cache's scales multiplied by `factor`.

    TensorRT-LLM multiplies new keys and values by the reciprocal, which stays correct, so only reading is wrong, not the codes.
    The file must contain the reciprocal. Otherwise TensorRT-LLM derives it from the wrong scale, and FP8 loses no precision if
    writing and reading use the same wrong scale.
    """
    out.mkdir()
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
            continue
        tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(KV_SIDES)}
        for name in [name for name in tensors if name.endswith(KV_SCALE)]:
            scale = tensors[name].item()
            tensors[name] = torch.tensor([scale * factor])
            tensors[name.replace(KV_SCALE, KV_RECIPROCAL)] = torch.tensor([1.0 / scale])
        save_file(tensors, out / path.name)
