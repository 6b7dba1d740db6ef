"""Writes `checkpoint/`: a plain Hugging Face checkpoint with the effective weights of the quantized engine.

If the checkpoint is quantized already, its weights are dequantized, and its scales of keys and values are read.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from stages.checkpoints.description import CheckpointInfo, read_config
from stages.checkpoints.files import INDEX, refusal
from stages.checkpoints.quantized import AWQ, CACHE_SCALE, INT8_INPUTS_KEY, MODELOPT_FILE, SCALED, Layout, scale_place
from stages.checkpoints.weights import tensors_on_disk
from stages.core.errors import short
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import KVScales, SideScales


def copy_checkpoint(info: CheckpointInfo, out: Path, skip: Collection[str] = ()) -> None:
    """Copy the checkpoint's known files byte for byte to the new directory `out`, without other files (pickles, code).

    Weights are copied into the store once and linked within it: a copy per KV policy would fill the disk, and a hard link to
    the user's file would change if that file were overwritten in place. `skip` names files that the caller writes itself; they
    must not be copied, because a copy may be a link.
    """
    out.mkdir(parents=True)
    link_or_copy_all([name for name in (*info.other_files, *info.weight_files) if name not in skip], info.path, out)


def write_dequantized(info: CheckpointInfo, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the checkpoint to the new directory `out` with the weights of the quantized layers replaced.

    Activation quantizers (FP8, INT8 SmoothQuant) are not reproduced, and unquantized tensors are kept. Replaced tensors are
    float16 if the source tensor is, otherwise float32: bfloat16's 8 bits would round the dequantized values. Raises
    RuntimeError if a weight is missing from the source, or exceeds float16.
    """
    widened = source_dtype(info) is torch.bfloat16
    copy_checkpoint(info, out, skip=(*info.weight_files, INDEX, *(["config.json"] if widened else [])))
    missing = set(weights)
    total_bytes = 0
    for name in info.weight_files:
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(info.path / name, framework="pt") as source:
            metadata = source.metadata()
            for key in source.keys():  # noqa: SIM118 (not a dict)
                tensor = source.get_tensor(key)
                if key in weights:
                    tensor = _cast(key, weights[key], tensor.dtype)
                    missing.discard(key)
                tensors[key] = tensor
                total_bytes += tensor.nbytes
        save_file(tensors, out / name, metadata=metadata)
    if missing:
        raise RuntimeError(f"quantized weights are missing in the checkpoint's files: {', '.join(sorted(missing)[:4])}")
    if INDEX in info.other_files:
        index = json.loads((info.path / INDEX).read_text(encoding="utf-8"))
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total_bytes}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if widened:  # with the old dtype, transformers would load `dtype="auto"` as bfloat16
        config = {key: value for key, value in read_config(info.path).items() if key != "torch_dtype"} | {"dtype": "float32"}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def source_dtype(info: CheckpointInfo) -> torch.dtype:
    """Return the dtype of the checkpoint's stored embedding; the dtype in config.json may be wrong."""
    for name in info.weight_files:
        with safe_open(info.path / name, framework="pt") as source:
            if "model.embed_tokens.weight" in source.keys():  # noqa: SIM118
                dtype: torch.dtype = source.get_slice("model.embed_tokens.weight")[:1].dtype
                return dtype
    raise RuntimeError(f"{info.path}: no model.embed_tokens.weight in {', '.join(info.weight_files)}")


def _cast(name: str, values: torch.Tensor, source: torch.dtype) -> torch.Tensor:
    if source is not torch.float16:
        return values.float().contiguous()
    halves = values.half().contiguous()
    if not torch.isfinite(halves).all():
        raise RuntimeError(f"{name}: dequantized values do not fit into float16")
    return halves


def write_plain(info: CheckpointInfo, out: Path, progress: Progress) -> None:
    """Write the checkpoint to the new directory `out` with dequantized float32 weights.

    16 bits would round the dequantized values. Other tensors are unchanged; scales of the cache are dropped. If engines round
    the inputs of quantized layers to INT8, config.json lists these layers so that the reference engine rounds them, too.
    """
    assert info.quantized is not None
    copy_checkpoint(info, out, skip=("config.json", INDEX, MODELOPT_FILE, *info.weight_files))
    config = {key: value for key, value in read_config(info.path).items() if key not in ("quantization_config", "torch_dtype")}
    config["dtype"] = "float32"
    places = tensor_files(info)
    layers = {name.rpartition(".")[0] for name in places}
    if info.quantized.inputs == "int8_token":
        config[INT8_INPUTS_KEY] = sorted(layer for layer in layers if info.quantized.layout(layer, places) is not None)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    index: dict[str, str] = {}
    for done, file in enumerate(info.weight_files):
        progress("dequantizing", done, len(info.weight_files))
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name, place in places.items() if place == file):
            layer, _, part = name.rpartition(".")
            layout = info.quantized.layout(layer, places)
            parts = () if layout is None else (layout.weight, *layout.required, *layout.optional)
            if layout is not None and part == layout.weight:
                stored = {key: read_tensor(info, places, f"{layer}.{key}") for key in parts if f"{layer}.{key}" in places}
                try:
                    tensors[f"{layer}.weight"] = dequantize_weight(layout, stored)
                except (RuntimeError, ValueError) as error:
                    reason = f"compressed-tensors cannot decompress {layer} ({short(error)}); download the checkpoint again"
                    raise refusal(info.path, reason) from None
            elif part not in parts and not CACHE_SCALE.fullmatch(name):
                tensors[name] = read_tensor(info, places, name)
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    progress("dequantizing", len(info.weight_files), len(info.weight_files))
    if INDEX in info.other_files:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1) + "\n", encoding="utf-8")


def copy_without_scales(info: CheckpointInfo, out: Path) -> None:
    """Copy the checkpoint to the new directory `out` without its cache scales, because an engine uses its policy's scales."""
    places = tensor_files(info)
    remaining = {name: file for name, file in places.items() if not CACHE_SCALE.fullmatch(name)}
    rewritten = {places[name] for name in places.keys() - remaining.keys()}
    copy_checkpoint(info, out, skip=rewritten | {INDEX} if rewritten else ())
    for file in rewritten:
        tensors = {name: read_tensor(info, places, name) for name, place in remaining.items() if place == file}
        save_file(tensors, out / file, metadata={"format": "pt"})
    if INDEX in info.other_files and rewritten:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": remaining}, indent=1) + "\n", encoding="utf-8")


def checkpoint_scales(info: CheckpointInfo, policy: KVPolicy) -> KVScales | None:
    """Return the checkpoint's own scales for a cache in the policy's format, or None if any scale is missing."""
    places = tensor_files(info)
    carried: list[dict[Side, tuple[float, ...]]] = [{} for _ in range(info.shape.layers)]
    for name in places:
        layer, stored_sides = scale_place(name) or (0, ())
        if stored_sides and layer < len(carried):
            tensor = read_tensor(info, places, name)
            if not (tensor.is_floating_point() and 0 < tensor.numel() <= info.shape.kv_heads * info.shape.head_dim):
                found = f"{tensor.dtype} of shape {list(tensor.shape)}"
                raise refusal(info.path, f"{places[name]}: {name} is {found}, which is not a scale; correct it")
            carried[layer] |= dict.fromkeys(stored_sides, tuple(tensor.float().flatten().tolist()))
    layers = []
    for number, scales in enumerate(carried):
        sides: dict[Side, SideScales] = {}
        for side, form in policy.sides(number).items():
            scale = scales.get(side.base, ())
            plain = form.dtype == "fp8_e4m3" and form.scale == "calibrated" and form.symmetric
            if not plain or len(scale) != form.static_scales(info.shape.kv_heads, info.shape.head_dim):
                return None
            if not all(0 < value < math.inf for value in scale):
                raise refusal(
                    info.path, f"layer {number}: a scale of its {side} is not a number above 0; correct the checkpoint"
                )
            sides[side] = SideScales(scale=scale)
        layers.append(sides)
    return KVScales(layers=tuple(layers))


def tensor_files(info: CheckpointInfo) -> dict[str, str]:
    return {name: file for name, (file, _) in tensors_on_disk(info).items()}


def read_tensor(info: CheckpointInfo, places: Mapping[str, str], name: str) -> torch.Tensor:
    with safe_open(info.path / places[name], framework="pt") as source:
        tensor: torch.Tensor = source.get_tensor(name)
        return tensor


def dequantize_weight(layout: Layout, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the float32 weight (out, in) of a layer's quantized tensors, dequantized by the library compressed-tensors."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    if layout is AWQ:
        packed = AutoAWQConverter().process({f"layer.{name}": part for name, part in parts.items()})
        parts = {name.removeprefix("layer."): part for name, part in packed.items()}
    scale, zero = parts["weight_scale"].float(), parts.get("weight_zero_point")
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    if layout is SCALED:
        weight: torch.Tensor = dequantize(parts["weight"], scale, zero)
        return weight.contiguous()
    bits = 32 * parts["weight_packed"].shape[1] // int(parts["weight_shape"][1])
    scheme = QuantizationScheme(targets=[], weights=QuantizationArgs(num_bits=bits, symmetric=zero is None, strategy="channel"))
    weight = PackedQuantizationCompressor.decompress({**parts, "weight_scale": scale}, scheme)["weight"]
    return weight.contiguous()
