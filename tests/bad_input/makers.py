"""Writes small files of every format that kvgate reads, byte by byte, so that any part can be made invalid."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from bad_input.forks import ROOT

TINY = ROOT / "stages" / "tiny" / "checkpoint"

Prepare = Callable[[Path], object]

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
"""Content of a Git LFS pointer."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1344,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

Header = dict[str, Any]

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I64": 8, "F8_E4M3": 1, "U8": 1}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a small Llama."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries, keys = (CONFIG[f"num_{name}_heads"] * CONFIG["head_dim"] for name in ("attention", "key_value"))
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return tensors | {"model.norm.weight": (hidden,)}


def safetensors(
    path: Path, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None = None,
    header: Callable[[Header], Header] = dict,
) -> None:  # fmt: skip
    """Write a safetensors file of zeros; `header` may change the header."""
    table: Header = {}
    offset = 0
    for name, shape in tensors.items():
        dtype = (dtypes or {}).get(name, "F32")
        end = offset + prod(shape) * BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header(table)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def checkpoint(directory: Path) -> Path:
    """Write a small valid checkpoint with the tiny model's tokenizer."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(TINY / name, directory / name)
    safetensors(directory / "model.safetensors", shapes())
    return directory


def with_model(change: Callable[[Path], object]) -> Prepare:
    """Create `model`, and call `change` with its directory."""
    return lambda directory: change(checkpoint(directory / "model"))


def with_file(name: str, content: str | bytes | Callable[[bytes], str | bytes]) -> Prepare:
    """Create `model` with one file replaced or changed."""

    def change(model: Path) -> None:
        new = content((model / name).read_bytes()) if callable(content) else content
        (model / name).write_bytes(new.encode() if isinstance(new, str) else new)

    return with_model(change)


def with_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Prepare:
    """Create `model` with a changed JSON file."""
    return with_file(name, lambda old: json.dumps(change(json.loads(old))))


def with_config(**changes: Any) -> Prepare:
    """Create `model` with changed values in config.json; a value of `...` removes the key."""
    return with_json("config.json", lambda old: {key: value for key, value in (old | changes).items() if value is not ...})


def with_weights(tensors: Mapping[str, tuple[int, ...]], **options: Any) -> Prepare:
    """Create `model` with these tensors. `options` are passed to `safetensors`."""
    return with_model(lambda model: safetensors(model / "model.safetensors", tensors, **options))


def with_shards(index: object, files: Mapping[str, list[str]] | None = None) -> Prepare:
    """Create `model` with shards and an index.

    Args:
        index: Content of the index.
        files: File -> names of its tensors; by default two shards have half of the tensors each.
    """
    tensors = shapes()
    halves = {"a.safetensors": list(tensors)[:10], "b.safetensors": list(tensors)[10:]}

    def change(model: Path) -> None:
        (model / "model.safetensors").unlink()
        for file, names in (files or halves).items():
            safetensors(model / file, {name: tensors[name] for name in names})
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return with_model(change)


def with_replaced(name: str, make: Callable[[Path], object]) -> Prepare:
    """Create `model`, delete one file, and call `make` with its path."""

    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return with_model(change)


def sparse_file(size: int) -> Callable[[Path], None]:
    """Create a sparse file of `size` bytes, which needs no disk space."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


def with_path(name: str, make: Callable[[Path], object]) -> Prepare:
    """Create the parents of a path below the directory, and call `make` with the path."""

    def prepare(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        make(directory / name)

    return prepare


def text_file(name: str, content: str | bytes) -> Prepare:
    """Create a file below the directory."""
    return with_path(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))
