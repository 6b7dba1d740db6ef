"""Declares a cache's format and scales in ModelOpt's exports of a model's weights.

ModelOpt's exporters silently drop or mislabel caches that they cannot express, and would export the weights again for every
policy. So they export the weights alone, once per model, and kvgate adds each policy's scales in the form in which ModelOpt
writes them. The files of an export may be links to another artifact's, so they are replaced, not changed.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stages.checkpoints.exports import algorithm
from stages.checkpoints.files import INDEX
from stages.checkpoints.quantized import MODELOPT_FILE
from stages.core.files import write_atomically
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales

CONFIG = "config.json"

FP8 = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
"""Declaration in config.json of the only cache that the unified export supports."""
TENSORRT_LLM_FP8_FLOOR = 1.0
"""Smallest FP8 cache scale in a TensorRT-LLM export; ModelOpt raises smaller scales to it."""


def declare_unified_hf(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    if not policy.quantized:
        return
    producer = {"name": "modelopt", "version": version("nvidia-modelopt")}
    declared = _read(directory / MODELOPT_FILE) or {"producer": producer}
    unquantized: dict[str, Any] = {"quant_algo": None, "quantized_layers": {}}
    quantization = declared.get("quantization", unquantized) | {"kv_cache_quant_algo": algorithm(policy.key)}
    _write(directory / MODELOPT_FILE, declared | {"quantization": quantization})
    config = _read(directory / CONFIG)
    embedded = config.get("quantization_config") or {"ignore": [], "producer": producer, "quant_method": "modelopt"}
    _write(directory / CONFIG, config | {"quantization_config": embedded | FP8})
    added = {
        f"model.layers.{layer}.self_attn.{side[0]}_proj.{side[0]}_scale": torch.tensor(static.scale[0])
        for layer, sides in enumerate(scales.layers)
        for side, static in sides.items()
    }
    last_shard = max(directory.glob("*.safetensors"))
    _add_tensors(last_shard, added)
    index = _read(directory / INDEX)
    if index:
        index["weight_map"] |= dict.fromkeys(added, last_shard.name)
        _write(directory / INDEX, index)


def declare_tensorrt_llm(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    """Declare the cache in an export. Keys and values share `kv_cache_scaling_factor`, the larger of their scales."""
    if not policy.quantized:
        return
    declaration, config = {"kv_cache_quant_algo": algorithm(policy.key)}, _read(directory / CONFIG)
    _write(directory / CONFIG, config | {"quantization": config["quantization"] | declaration})
    by_layer = directory / "quant_cfg.json"
    if by_layer.exists():
        _write(by_layer, _read(by_layer) | declaration)
    floor = TENSORRT_LLM_FP8_FLOOR if algorithm(policy.key) == "FP8" else 0.0
    added: dict[str, torch.Tensor] = {}
    for layer, sides in enumerate(scales.layers):
        factors = {side[0]: max(static.scale[0], floor) for side, static in sides.items()}
        factors["kv"] = max(factors.values())
        prefix = f"transformer.layers.{layer}.attention"
        added |= {f"{prefix}.{name}_cache_scaling_factor": torch.tensor([factor]) for name, factor in factors.items()}
    for rank in directory.glob("rank*.safetensors"):
        _add_tensors(rank, added)


def _add_tensors(file: Path, added: dict[str, torch.Tensor]) -> None:
    scratch = file.with_suffix(".scratch")
    save_file(load_file(file) | added, scratch, {"format": "pt"})
    scratch.replace(file)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def _write(file: Path, content: object) -> None:
    write_atomically(file, json.dumps(content, indent=4) + "\n")
