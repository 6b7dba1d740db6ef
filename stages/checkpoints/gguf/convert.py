"""Converts a GGUF file to a Hugging Face checkpoint: safetensors, config.json and a tokenizer.

transformers' own GGUF reader is not used: it drops tensors with unknown names, fills in missing tensors, ignores rotary
scaling, and builds a tokenizer that differs from the model's.
"""

import json
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

from stages.checkpoints.files import SINGLE, write_end_tokens
from stages.checkpoints.gguf.header import GGUFTensor
from stages.checkpoints.gguf.model import GGUFModel, inspect_gguf, pairs_neighbours
from stages.checkpoints.gguf.tokenizer import write_tokenizer
from stages.core.records import Progress

STORED_AS = {"F32": ("float32",), "F16": ("float16", "float32"), "BF16": ("bfloat16", "float32")}
"""Common type of all matrices -> types that represent them exactly. The first type that also covers the vectors is written."""
QUANTIZED_AS = ("float16", "bfloat16")
"""Types for dequantized weights. float16 keeps three more bits than bfloat16 (relative rms error of SmolLM2's Q4_1: 1.9e-4
instead of 1.4e-3). bfloat16 is used for weights beyond float16's maximum of 65,504."""


ROTATED = {".attn_q.weight": "num_attention_heads", ".attn_k.weight": "num_key_value_heads"}
"""Suffix of the names of matrices whose rows GGUF reorders -> key of config.json with their number of heads."""


def convert_gguf(gguf: Path, out: Path, *, progress: Progress) -> None:
    """Write a GGUF as a Hugging Face checkpoint to an empty directory.

    If all matrices are F32, F16 or BF16, the weights keep that type. Otherwise (quantized or mixed) they become float16, or
    bfloat16 if a value exceeds float16. Vectors get the type of the matrices. The rows of a Llama's queries and keys are
    restored to transformers' order, and the 1 that llama.cpp adds to a Gemma's norms is subtracted. Raises UserError if
    inspect_gguf refuses the file, its tensors are not those of the model, or a weight is not finite.
    """
    model = inspect_gguf(gguf)
    kinds = {tensor.kind for name, tensor in model.header.tensors.items() if name in model.names and len(tensor.shape) > 1}
    types = STORED_AS.get(kinds.pop(), QUANTIZED_AS) if len(kinds) == 1 else QUANTIZED_AS
    for dtype in types:
        tensors: dict[str, torch.Tensor] = {}
        unfit = ""
        for done, (name, target) in enumerate(model.names.items()):
            progress("converting", done, len(model.names))
            tensors[target] = _weights(model, name).to(getattr(torch, dtype))
            if not torch.isfinite(tensors[target]).all():
                unfit = name
                break
        if not unfit:
            break
    if unfit:
        raise model.header.error(f"tensor {unfit} holds a value that is not finite as {dtype}; convert the model again")
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    progress("converting", len(model.names), len(model.names))
    write_tokenizer(model.vocabulary, model.info.max_positions, out)
    write_end_tokens(model.vocabulary.ends, out)
    text = json.dumps({**model.config, "torch_dtype": dtype}, indent=1)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def _weights(model: GGUFModel, name: str) -> torch.Tensor:
    """Return the float32 values of a tensor in transformers' layout."""
    tensor = model.header.tensors[name]
    values = torch.from_numpy(read_tensor(model.header.path, tensor))
    heads = next((model.config[key] for end, key in ROTATED.items() if name.endswith(end)), None)
    if heads is not None and pairs_neighbours(model.config["model_type"]):
        # llama.cpp rotates pairs of neighbouring channels, transformers pairs from the two halves of a head.
        rows, columns = values.shape
        values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    # transformers multiplies by 1 + weight, llama.cpp by the stored weight.
    return values - 1 if model.config["model_type"] == "gemma3_text" and values.dim() == 1 else values


def read_tensor(path: Path, tensor: GGUFTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    stored = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(*tensor.shape[:-1], -1)
    values = dequantize(np.array(stored), GGMLQuantizationType[tensor.kind])
    return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)
