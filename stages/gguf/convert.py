"""Converts a GGUF file to a Hugging Face checkpoint: safetensors, config.json and a tokenizer.

transformers' own reader of GGUF is not used: it drops tensors that it has no name for, fills in what is missing, forgets rotary
scaling, and makes another tokenizer than the model's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

from pipeline.checkpoint.ends import write_ends
from pipeline.checkpoint.files import INDEX, SINGLE
from pipeline.core.records import Progress
from pipeline.gguf.header import Tensor
from pipeline.gguf.model import GGUFModel, inspect_gguf, pairs_neighbours
from stages.gguf.tokenizer import write_tokenizer

SHARD_BYTES = 4_000_000_000

STORED_AS = {"F32": ("float32",), "F16": ("float16", "float32"), "BF16": ("bfloat16", "float32")}
"""Type of all matrices -> the types that hold them exactly; the first that holds the vectors' range, too, is written."""
QUANTIZED_AS = ("float16", "bfloat16")
"""Of the 16-bit types, float16 keeps three more bits of a dequantized weight (the rms error of SmolLM2's Q4_1 is 1.9e-4 of the
weights' own, in bfloat16 1.4e-3); bfloat16 is for weights beyond float16's 65,504."""


class _OutOfRange(Exception):
    """A value is finite in the file, and not in the type that is written."""


def convert_gguf(gguf: Path, out: Path, *, progress: Progress) -> None:
    """Write the checkpoint of a GGUF to an empty directory.

    Weights keep their type: F32, F16 or BF16 where all matrices have it. Otherwise (quantized, or mixed) they become float16,
    or bfloat16 where a value is too large for it; vectors follow the matrices. The rows of a Llama's queries and keys are put
    back in transformers' order; from a Gemma's norms the 1 is taken that llama.cpp adds.

    Args:
        gguf: The file.
        out: An empty directory.
        progress: Called with the tensors that are done.

    Raises:
        UserError: inspect_gguf refuses the file, or a weight is not finite.
    """
    model = inspect_gguf(gguf)
    kinds = {tensor.kind for name, tensor in model.header.tensors.items() if name in model.names and len(tensor.shape) > 1}
    types = STORED_AS.get(kinds.pop(), QUANTIZED_AS) if len(kinds) == 1 else QUANTIZED_AS
    for name in types:
        for stale in out.glob("*.safetensors"):  # of a type that turned out too narrow
            stale.unlink()
        try:
            _write_weights(model, getattr(torch, name), out, progress)
            break
        except _OutOfRange as error:
            reason = error
    else:
        raise model.header.error(f"{reason}; convert the model again")
    write_tokenizer(model.vocabulary, model.info.max_positions, out)
    write_ends(model.vocabulary.ends, out)
    text = json.dumps({**model.config, "torch_dtype": name}, indent=1)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def _write_weights(model: GGUFModel, dtype: torch.dtype, out: Path, progress: Progress) -> None:
    shards = _shards(model, dtype)
    weight_map: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            progress("converting", done, len(model.names))
            tensors[model.names[name]] = _cast(name, _weights(model, name), dtype)
            done += 1
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    progress("converting", done, len(model.names))


def _shards(model: GGUFModel, dtype: torch.dtype) -> list[list[str]]:
    """Return the names of the GGUF's tensors, a file each of at most SHARD_BYTES or one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in model.names:
        nbytes = int(np.prod(model.header.tensors[name].shape)) * dtype.itemsize
        if shards[-1] and filled + nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _weights(model: GGUFModel, name: str) -> torch.Tensor:
    """Return the float32 values of a tensor, as transformers arranges them."""
    tensor = model.header.tensors[name]
    values = torch.from_numpy(read_tensor(model.header.path, tensor))
    heads = _rotated_heads(model.config, name)
    if heads is not None:
        # llama.cpp rotates neighbours, transformers the two halves of a head.
        rows, columns = values.shape
        values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    # transformers multiplies by 1 + weight, llama.cpp by what it stores.
    return values - 1 if model.config["model_type"] == "gemma3_text" and values.dim() == 1 else values


def read_tensor(path: Path, tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the values of a tensor of a GGUF as float32."""
    stored = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(*tensor.shape[:-1], -1)
    values = dequantize(np.array(stored), GGMLQuantizationType[tensor.kind])
    return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)


def _rotated_heads(config: Mapping[str, Any], name: str) -> int | None:
    """Return the heads of a matrix whose rows llama.cpp has in another order than transformers; None for all others."""
    if not pairs_neighbours(config["model_type"]):
        return None
    if name.endswith(".attn_q.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith(".attn_k.weight") else None


def _cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = values.to(dtype)
    if not torch.isfinite(cast).all():
        raise _OutOfRange(f"tensor {name} holds a value that is not finite as {str(dtype).removeprefix('torch.')}")
    return cast
