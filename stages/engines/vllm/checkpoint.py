"""The checkpoint that vLLM loads: unchanged weights, and the cache's scales in the format of compressed-tensors.

The scales are tensors `model.layers.N.self_attn.{k,v}_scale` (float32; one number, or one per KV head) in a separate file,
declared in config.json. If the index names no file for a scale, vLLM silently uses 1.0.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from stages.checkpoints.description import CheckpointInfo, read_config
from stages.checkpoints.files import INDEX
from stages.checkpoints.rope import rope_at_top_level
from stages.checkpoints.weights import tensors_on_disk
from stages.engines.interpreter.backend import copy_linking_weights
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import KVScales

CONFIG = "config.json"
CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a quantization_config that describe the cache."""
SCALES = "kv_scales.safetensors"
NAME = "model.layers.{layer}.self_attn.{side}_scale"
LETTERS = {Side.KEY: "k", Side.VALUE: "v"}


def delivers_scales(policy: KVPolicy) -> bool:
    """Return whether the checkpoint gets scales. vLLM uses no scales for E5M2, and refuses a checkpoint that has them."""
    return policy.key.dtype != "fp8_e5m2" and policy.key.has_static_scales and policy.value.has_static_scales


def write_checkpoint(info: CheckpointInfo, out: Path, policy: KVPolicy, scales: KVScales) -> None:
    """Write a checkpoint with the weights of `info` and the cache's scales to the new directory `out`."""
    other_files = [name for name in info.other_files if name not in (CONFIG, INDEX)]
    copy_linking_weights((*info.weight_files, *other_files), info.path, out)
    # vLLM may use a transformers release that ignores rope_parameters and would silently assume a base of 10,000.
    config: dict[str, Any] = rope_at_top_level(json.loads((info.path / CONFIG).read_text(encoding="utf-8")))
    extra = {key: value for key, value in (read_config(info.path).get("quantization_config") or {}).items() if key not in CACHE}
    if extra:
        config["quantization_config"] = extra
    if delivers_scales(policy):
        config["quantization_config"] = quantization_config(policy) | extra
        _write_index(info, out, write_scales(out, scales))
    elif (info.path / INDEX).is_file():
        shutil.copyfile(info.path / INDEX, out / INDEX)
    (out / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def quantization_config(policy: KVPolicy) -> dict[str, Any]:
    """Return the quantization_config in compressed-tensors' format for a checkpoint in which only the cache is quantized."""
    scheme = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "attn_head" if policy.key.granularity == "per_head" else "tensor",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }


def write_faulted(scales: KVScales, checkpoint: Path, out: Path, key_fault: float) -> None:
    """Write a copy of a checkpoint to the new directory `out` with key scales multiplied by `key_fault`."""
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != SCALES)
    copy_linking_weights(names, checkpoint, out)
    write_scales(out, scales, key_fault)


def write_scales(out: Path, scales: KVScales, key_fault: float = 1.0) -> list[str]:
    """Write the file of scales and return the names of its tensors."""
    tensors = {}
    for layer, sides in enumerate(scales.layers):
        for side, letter in LETTERS.items():
            if side not in sides:
                continue  # a skipped layer
            numbers = np.array(sides[side].scale, np.float32) * np.float32(key_fault if side is Side.KEY else 1.0)
            tensors[NAME.format(layer=layer, side=letter)] = numbers
    save_file(tensors, out / SCALES)
    return list(tensors)


def _write_index(info: CheckpointInfo, out: Path, scales: list[str]) -> None:
    places = {name: file for name, (file, _) in tensors_on_disk(info).items()} | dict.fromkeys(scales, SCALES)
    size = sum((out / file).stat().st_size for file in (*info.weight_files, SCALES))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def stored_scales(checkpoint: Path, layers: int) -> list[dict[Side, tuple[float, ...]]]:
    """Return a checkpoint's scales by layer and side; a side without scales is absent."""
    tensors = load_file(checkpoint / SCALES) if (checkpoint / SCALES).is_file() else {}
    scales: list[dict[Side, tuple[float, ...]]] = [{} for _ in range(layers)]
    for layer, sides in enumerate(scales):
        for side, letter in LETTERS.items():
            name = NAME.format(layer=layer, side=letter)
            if name in tensors:
                sides[side] = tuple(tensors[name].tolist())
    return scales
