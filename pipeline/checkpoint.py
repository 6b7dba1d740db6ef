"""What a Hugging Face checkpoint directory is, read from its JSON alone: no torch, no transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.kv import KVShape

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders whose attention is quantized, exported and tested here."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that passed the checks. Files are names inside `path`."""

    path: Path
    architecture: str
    shape: KVShape
    q_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    """Longest sequence that the model's rotary embedding was made for, in tokens."""
    rope_scaling: str | None
    """Kind of rotary scaling (`llama3`, `yarn`, ...), None for plain rotary embeddings."""
    sliding_window: int | None
    weight_files: tuple[str, ...]
    other_files: tuple[str, ...]
    """config.json, generation_config.json, the shard index and the tokenizer's files, as far as they exist."""


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Read and check `path`; raise UserError naming `model.path`, what is wrong and what to do."""
    if not path.is_dir():
        raise UserError(f"model.path={path}: no such directory; give a local Hugging Face checkpoint")
    config = _read_json(path, "config.json")
    architecture = _architecture(path, config)
    if "quantization_config" in config:
        raise UserError(f"model.path={path}: the checkpoint is already quantized; give the unquantized one")
    weight_files, index = _weight_files(path)
    tokenizer = tuple(name for name in TOKENIZER_FILES if (path / name).is_file())
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(tokenizer):
        raise UserError(f"model.path={path}: no tokenizer (tokenizer.json); save it there with tokenizer.save_pretrained")
    generation = ("generation_config.json",) if (path / "generation_config.json").is_file() else ()
    other_files = ("config.json", *generation, *index, *tokenizer)
    for name in (*weight_files, *other_files):
        _refuse_escape(path, name)

    q_heads = _integer(path, config, "num_attention_heads")
    hidden_size = _integer(path, config, "hidden_size")
    kv_heads = _integer(path, config, "num_key_value_heads", default=q_heads)
    head_dim = _integer(path, config, "head_dim", default=hidden_size // q_heads)
    if config.get("head_dim") is None and hidden_size % q_heads:
        raise UserError(f"model.path={path}: config.json has no head_dim, and {q_heads} heads do not divide {hidden_size}")
    if q_heads % kv_heads:
        raise UserError(f"model.path={path}: num_key_value_heads={kv_heads} must divide num_attention_heads={q_heads}")
    if head_dim % 2:
        raise UserError(f"model.path={path}: head_dim={head_dim} must be even (rotary embeddings, packed INT4)")
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    return CheckpointInfo(
        path=path,
        architecture=architecture,
        shape=KVShape(_integer(path, config, "num_hidden_layers"), kv_heads, head_dim),
        q_heads=q_heads,
        hidden_size=hidden_size,
        vocab_size=_integer(path, config, "vocab_size"),
        max_positions=_integer(path, config, "max_position_embeddings"),
        rope_scaling=None if kind == "default" else kind,
        sliding_window=_sliding_window(architecture, config),
        weight_files=weight_files,
        other_files=other_files,
    )


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model.path={path}: not a Hugging Face checkpoint, {name} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model.path={path}: {name} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"model.path={path}: {name} must hold a JSON object")
    return content


def _architecture(path: Path, config: dict[str, Any]) -> str:
    declared = config.get("architectures")
    if not isinstance(declared, list) or len(declared) != 1:
        raise UserError(f"model.path={path}: config.json must name one class in architectures, got {declared}")
    architecture = str(declared[0])
    if architecture not in ARCHITECTURES:
        raise UserError(f"model.path={path}: {architecture} is not supported; use one of {', '.join(ARCHITECTURES)}")
    return architecture


def _integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise UserError(f"model.path={path}: config.json: {key} must be a positive integer, got {value}")
    return value


def _sliding_window(architecture: str, config: dict[str, Any]) -> int | None:
    # Qwen checkpoints carry a sliding_window that use_sliding_window=false turns off; Mistral's is always on.
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return None
    return config.get("sliding_window") if architecture != "LlamaForCausalLM" else None


def _weight_files(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Safetensors files that transformers would load, and the index when there is one."""
    if (path / SINGLE).is_file():
        return (SINGLE,), ()
    if not (path / INDEX).is_file():
        pickles = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
        if pickles:
            raise UserError(
                f"model.path={path}: only pickled weights ({pickles[0]}), which are never loaded; "
                "save as safetensors with model.save_pretrained"
            )
        raise UserError(f"model.path={path}: no weights, {SINGLE} is missing")
    weight_map = _read_json(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"model.path={path}: {INDEX} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"model.path={path}: {INDEX} names {name!r}, which is not a safetensors file beside it")
        if not (path / name).is_file():
            raise UserError(f"model.path={path}: {INDEX} names {name}, which is missing")
    return tuple(names), (INDEX,)


def _refuse_escape(path: Path, name: str) -> None:
    if not (path / name).resolve().is_relative_to(path.resolve()):
        raise UserError(f"model.path={path}: {name} is a link that leaves the directory; copy the files (cp -rL)")
