"""`checkpoint/`: a plain Hugging Face checkpoint whose weights are those that the quantized engine multiplies with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.core.checkpoint import INDEX, CheckpointInfo
from stages.engines.files import link_or_copy


def copy_checkpoint(info: CheckpointInfo, out: Path) -> None:
    """The checkpoint's known files byte for byte; anything else (pickles, code) stays behind.

    Weights are hard links where possible: a copy for every KV policy would fill the disk, and nothing here writes into a
    finished `checkpoint/`. Should their owner overwrite the original in place, the store notices by the digest that it
    verifies before each use. JSON is copied: people edit it in place, and it costs nothing.
    """
    out.mkdir(parents=True)
    for name in info.other_files:
        shutil.copyfile(info.path / name, out / name)
    for name in info.weight_files:
        link_or_copy(info.path / name, out / name)


def write_dequantized(info: CheckpointInfo, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the checkpoint with `weights` (tensor name -> float32 values W, so that plain x W^T is the layer) put in.

    Activation quantizers (FP8, INT8 SmoothQuant) are not part of a plain checkpoint and are not reproduced. Tensors
    that were not quantized keep their values and dtype. The others are float16 when the source tensor was float16, else
    float32: bfloat16's 8 bits would blur the codes. Raises RuntimeError when a quantized weight is not in the source,
    or does not fit into float16.
    """
    out.mkdir(parents=True)
    for name in info.other_files:
        shutil.copyfile(info.path / name, out / name)
    left = set(weights)
    total_bytes = 0
    for name in info.weight_files:
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(info.path / name, framework="pt") as source:
            metadata = source.metadata()
            for key in source.keys():  # noqa: SIM118 (not a dict)
                tensor = source.get_tensor(key)
                if key in weights:
                    tensor = _store(key, weights[key], tensor.dtype)
                    left.discard(key)
                tensors[key] = tensor
                total_bytes += tensor.nbytes
        save_file(tensors, out / name, metadata=metadata)
    if left:
        raise RuntimeError(f"quantized weights that the checkpoint's files do not hold: {', '.join(sorted(left)[:4])}")
    if INDEX in info.other_files:
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        index["metadata"] = {**index.get("metadata", {}), "total_size": total_bytes}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if source_dtype(info) is torch.bfloat16:
        _declare_float32(out / "config.json")


def source_dtype(info: CheckpointInfo) -> torch.dtype:
    """Dtype in which the checkpoint stores its embedding; what the config says is not always so."""
    for name in info.weight_files:
        with safe_open(info.path / name, framework="pt") as source:
            if "model.embed_tokens.weight" in source.keys():  # noqa: SIM118
                dtype: torch.dtype = source.get_slice("model.embed_tokens.weight")[:1].dtype
                return dtype
    raise RuntimeError(f"{info.path}: no model.embed_tokens.weight in {', '.join(info.weight_files)}")


def _store(name: str, values: torch.Tensor, source: torch.dtype) -> torch.Tensor:
    if source is not torch.float16:
        return values.float().contiguous()
    halves = values.half().contiguous()
    if not torch.isfinite(halves).all():
        raise RuntimeError(f"{name}: dequantized values do not fit into float16")
    return halves


def _declare_float32(config_file: Path) -> None:
    """Without this transformers would load `dtype="auto"` in bfloat16 again."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
