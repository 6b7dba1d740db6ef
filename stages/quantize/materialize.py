"""Writes `checkpoint/`: a plain Hugging Face checkpoint whose weights are those that the quantized engine multiplies with."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.artifacts.files import link_or_copy
from pipeline.checkpoint.description import CheckpointInfo
from pipeline.checkpoint.files import INDEX


def copy_checkpoint(info: CheckpointInfo, out: Path, but: Collection[str] = ()) -> None:
    """Copy the checkpoint's known files byte for byte to `out`, a new directory; other files (pickles, code) are left out.

    Weights are copied into the store once: a copy for every KV policy would fill the disk, and a hard link to the owner's file
    would follow what is written to it in place. Files that are written anew are in `but`: a copy may be a link as well.
    """
    out.mkdir(parents=True)
    for name in (*info.other_files, *info.weight_files):
        if name not in but:
            link_or_copy(info.path / name, out / name)


def write_dequantized(info: CheckpointInfo, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the checkpoint to `out`, a new directory, with the weights of the quantized layers replaced.

    A plain checkpoint has no activation quantizers (FP8, INT8 SmoothQuant), so they are not reproduced. Tensors that were
    not quantized keep their values and dtype. The others are float16 where the source tensor is float16, else float32:
    bfloat16's 8 bits would blur the codes.

    Raises:
        RuntimeError: A quantized weight is not in the source, or does not fit into float16.
    """
    widened = source_dtype(info) is torch.bfloat16
    copy_checkpoint(info, out, but=(*info.weight_files, INDEX, *(["config.json"] if widened else [])))
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
        raise RuntimeError(f"quantized weights that the checkpoint's files do not hold: {', '.join(sorted(missing)[:4])}")
    if INDEX in info.other_files:
        index = json.loads((info.path / INDEX).read_text(encoding="utf-8"))
        index["metadata"] = {**index.get("metadata", {}), "total_size": total_bytes}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if widened:  # transformers would load `dtype="auto"` in bfloat16 again
        config = json.loads((info.path / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_weights(info: CheckpointInfo, weights: Mapping[str, torch.Tensor]) -> None:
    """Check that a checkpoint that `write_dequantized` wrote holds these weights.

    Raises:
        RuntimeError: naming a weight that differs.
    """
    for name in info.weight_files:
        with safe_open(info.path / name, framework="pt") as stored:
            for key in weights.keys() & set(stored.keys()):
                tensor = stored.get_tensor(key)
                if not torch.equal(tensor, _cast(key, weights[key], tensor.dtype)):
                    raise RuntimeError(f"{key}: quantized again, it is another than in {info.path}")


def source_dtype(info: CheckpointInfo) -> torch.dtype:
    """Return the dtype in which the checkpoint stores its embedding, which its config does not always state correctly."""
    for name in info.weight_files:
        with safe_open(info.path / name, framework="pt") as source:
            if "model.embed_tokens.weight" in source.keys():  # noqa: SIM118
                dtype: torch.dtype = source.get_slice("model.embed_tokens.weight")[:1].dtype
                return dtype
    raise RuntimeError(f"{info.path}: no model.embed_tokens.weight in {', '.join(info.weight_files)}")


def _cast(name: str, values: torch.Tensor, source: torch.dtype) -> torch.Tensor:
    """Return `values` in float16 where the source is float16, else in float32."""
    if source is not torch.float16:
        return values.float().contiguous()
    halves = values.half().contiguous()
    if not torch.isfinite(halves).all():
        raise RuntimeError(f"{name}: dequantized values do not fit into float16")
    return halves
