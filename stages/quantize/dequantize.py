"""Dequantizes the weights that a checkpoint stores quantized, and reads the scales of keys and values beside them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.checkpoint.description import MODELOPT_FILE, CheckpointInfo, read_config
from pipeline.checkpoint.files import INDEX
from pipeline.checkpoint.quantized import AWQ, CACHE_SCALE, GPTQ, PACKED, ROUNDED, Layout, Shape
from pipeline.checkpoint.weights import tensors_on_disk
from pipeline.core.kv import KVPolicy, KVShape, Side
from pipeline.core.records import Progress
from pipeline.core.scales import KVScales, SideScales
from stages.engines.vllm.audit import audit
from stages.quantize.materialize import copy_checkpoint

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within an int32 of each of eight neighbouring columns."""


def write_plain(info: CheckpointInfo, out: Path, progress: Progress) -> None:
    """Write a checkpoint to `out`, a new directory, with the weights of quantized layers as float32.

    16 bits would blur the codes. Other tensors stay as they are; scales of the cache are left out. config.json names the layers
    whose inputs the checkpoint's engine rounds to INT8, which the oracle then does as well.
    """
    assert info.quantized is not None
    copy_checkpoint(info, out, but=("config.json", INDEX, MODELOPT_FILE, *info.weight_files))
    config = {key: value for key, value in read_config(info.path).items() if key not in ("quantization_config", "torch_dtype")}
    config["dtype"] = "float32"
    places = tensor_files(info)
    layers = {name.rpartition(".")[0] for name in places}
    if info.quantized.inputs == "int8_token":
        config[ROUNDED] = sorted(layer for layer in layers if info.quantized.layout(layer, places) is not None)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    index: dict[str, str] = {}
    for done, file in enumerate(info.weight_files):
        progress("dequantizing", done, len(info.weight_files))
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name, place in places.items() if place == file):
            layer, _, part = name.rpartition(".")
            layout = info.quantized.layout(layer, places)
            parts = () if layout is None else (layout.weight, *layout.needed, *layout.others)
            if layout is not None and part == layout.weight:
                stored = {key: read_tensor(info, places, f"{layer}.{key}") for key in parts if f"{layer}.{key}" in places}
                tensors[f"{layer}.weight"] = dequantized(layout, stored, info.quantized.block)
            elif part not in parts and not CACHE_SCALE.fullmatch(name):
                tensors[name] = read_tensor(info, places, name)
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    progress("dequantizing", len(info.weight_files), len(info.weight_files))
    if INDEX in info.other_files:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1) + "\n", encoding="utf-8")


def copy_without_scales(info: CheckpointInfo, out: Path) -> None:
    """Copy the checkpoint to `out`, a new directory, without scales of the cache: an engine is given those of its policy."""
    places = tensor_files(info)
    kept = {name: file for name, file in places.items() if not CACHE_SCALE.fullmatch(name)}
    anew = {places[name] for name in places.keys() - kept.keys()}
    copy_checkpoint(info, out, but=anew | {INDEX} if anew else ())
    for file in anew:
        tensors = {name: read_tensor(info, places, name) for name, place in kept.items() if place == file}
        save_file(tensors, out / file, metadata={"format": "pt"})
    if INDEX in info.other_files and anew:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}, indent=1) + "\n", encoding="utf-8")


def own_scales(path: Path, policy: KVPolicy, shape: KVShape) -> KVScales | None:
    """Return the scales that a checkpoint carries of a cache in the policy's format; None where it carries none of that."""
    layers = []
    for number, layer in enumerate(audit(path).layers):
        sides: dict[Side, SideScales] = {}
        for side, form in policy.sides(number).items():
            scale = layer.carried.get(side.base, ())
            plain = form.dtype == "fp8_e4m3" and form.scale == "calibrated" and form.symmetric
            if not plain or len(scale) != form.static_scales(shape.kv_heads, shape.head_dim):
                return None
            sides[side] = SideScales(scale=scale)
        layers.append(sides)
    return KVScales(layers=tuple(layers))


def tensor_files(info: CheckpointInfo) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint."""
    return {name: file for name, (file, _) in tensors_on_disk(info).items()}


def read_tensor(info: CheckpointInfo, places: Mapping[str, str], name: str) -> torch.Tensor:
    with safe_open(info.path / places[name], framework="pt") as source:
        tensor: torch.Tensor = source.get_tensor(name)
        return tensor


def dequantized(layout: Layout, parts: Mapping[str, torch.Tensor], block: Shape | None = None) -> torch.Tensor:
    """Return the float32 weight (out, in) that the parts of a layer stand for.

    Sources of the layouts: compressed-tensors 0.17 (compressors), vLLM 0.32 (auto_gptq.py, auto_awq.py, modelopt.py, fp8.py).
    """
    codes = parts[layout.weight]
    if layout is GPTQ:
        groups = parts["g_idx"].long()
        bits = 32 * codes.shape[0] // len(groups)
        return ((_unpacked(codes, bits, 0) - (1 << bits - 1)).float() * parts["scales"].float()[groups]).T.contiguous()
    if layout is AWQ:
        order = [8 * (column // 8) + AWQ_ORDER[column % 8] for column in range(8 * codes.shape[1])]
        zeros, scales = _unpacked(parts["qzeros"], 4, 1)[:, order].float(), parts["scales"].float()
        size = codes.shape[0] // len(scales)
        numbers = _unpacked(codes, 4, 1)[:, order].float() - zeros.repeat_interleave(size, 0)
        return (numbers * scales.repeat_interleave(size, 0)).T.contiguous()
    zero = parts.get("weight_zero_point")
    if layout is PACKED:
        bits = 32 * codes.shape[1] // int(parts["weight_shape"][1])
        codes = _unpacked(codes, bits, 1) - (1 << bits - 1)
        zero = None if zero is None else _unpacked(zero, bits, 0) - (1 << bits - 1)
    shape = tuple(codes.shape)
    numbers = codes.float() if zero is None else codes.float() - _spread(zero, shape, block)
    return (numbers * _spread(parts[layout.needed[0]], shape, block)).contiguous()


def _unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned codes that int32 words hold along a dimension, the lowest bits first."""
    codes = words.unsqueeze(dim + 1) >> torch.arange(0, 32, bits, dtype=torch.int32).view(-1, *([1] * (1 - dim)))
    return (codes & (1 << bits) - 1).flatten(dim, dim + 1)


def _spread(scales: torch.Tensor, shape: Shape, block: Shape | None) -> torch.Tensor:
    """Return for each weight the scale, or the zero point, of the tensor, row, group or block that the weight is in."""
    spread = scales.float()
    spread = spread.reshape(-1, 1) if spread.dim() < 2 else spread
    for dim, size in enumerate(shape):
        count = spread.shape[dim]
        each = block[dim] if block is not None and -(-size // block[dim]) == count else -(-size // count)
        spread = spread.repeat_interleave(each, dim).narrow(dim, 0, size)
    return spread
