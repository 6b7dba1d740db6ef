"""Checkpoints with weights quantized by hand in every supported form, and their dequantized values."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""Stored tensors of a layer, and its dequantized weight."""


def _group(form: str, bits: int, kind: str, strategy: str, inputs: bool, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **fields}
    rounded = {**weights, "strategy": "token", "dynamic": True} if inputs else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounded, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    } | {"config_groups": {"group_0": group}}


def _scaled(weight: torch.Tensor, dtype: torch.dtype, limit: float, *, by_channel: bool = True) -> Made:
    scale = (weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax()) / limit
    steps = weight / scale
    codes = (steps.round() if dtype is torch.int8 else steps).to(dtype)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _modelopt(weight: torch.Tensor) -> Made:
    parts, numbers = _scaled(weight, E4M3, 448, by_channel=False)
    return parts | {"input_scale": torch.tensor(0.05)}, numbers


def _four_bits(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 4-bit codes (0 to 15, zero at 8), a scale per code, and a scale per group of `size` columns."""
    scale = torch.stack([part.abs().amax(1) for part in torch.split(weight, size, 1)], 1) / 7
    column_scales = scale.repeat_interleave(size, 1)
    return (weight / column_scales).round().clamp(-8, 7) + 8, column_scales, scale


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight columns into each int32: bits 4k to 4k + 3 hold column `order[k]` of the eight."""
    eights = codes.numpy().astype(np.uint32).reshape(len(codes), -1, 8)[..., order]
    words = np.bitwise_or.reduce(eights << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
    return torch.from_numpy(words.view(np.int32))


def _int4(weight: torch.Tensor) -> Made:
    codes, column_scales, scale = _four_bits(weight, 32)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _packed(codes), "weight_scale": scale, "weight_shape": shape}, (codes - 8) * column_scales


def _awq(weight: torch.Tensor) -> Made:
    codes, _, scale = _four_bits(weight, 32)
    zeros = (torch.arange(scale.numel()) % 16).reshape(scale.shape)  # any zero points do
    half, shift = scale.repeat_interleave(32, 1).half().float(), zeros.repeat_interleave(32, 1)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _packed(codes.T, order), "qzeros": _packed(zeros.T, order), "scales": scale.T.contiguous().half()}
    return parts, (codes - shift) * half


FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Made]]] = {
    "W8A8 INT8": (_group("int-quantized", 8, "int", "channel", inputs=True), partial(_scaled, dtype=torch.int8, limit=127)),
    "FP8": (_group("float-quantized", 8, "float", "channel", inputs=True), partial(_scaled, dtype=E4M3, limit=448)),
    "W4A16": (_group("pack-quantized", 4, "int", "group", inputs=False, group_size=32), _int4),
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, _modelopt),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq),
}


def quantize_checkpoint(source: Path, out: Path, form: str, cache_scale: float | None = None) -> Tensors:
    """Write a one-file checkpoint with quantized linear layers, and return its dequantized weights.

    `cache_scale` is the scale of layer 0's keys; each following scale (values of layer 0, keys of layer 1, ...) is half of
    the previous scale.
    """
    shutil.copytree(source, out)
    declared, make = FORMS[form]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    numbers, stored = load_file(source / "model.safetensors"), Tensors()
    for name, tensor in list(numbers.items()):
        layer = name.rpartition(".")[0]
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, numbers[name] = make(tensor.float())
        stored |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    if cache_scale is not None:
        declared = declared | {"kv_cache_scheme": SCHEME}
        for number in range(2 * config["num_hidden_layers"]):
            letter = "kv"[number % 2]
            stored[f"model.layers.{number // 2}.self_attn.{letter}_proj.{letter}_scale"] = torch.tensor(cache_scale / 2**number)
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": declared}), encoding="utf-8")
    (out / "model.safetensors").unlink()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return numbers
