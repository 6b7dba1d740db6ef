"""Checkpoints without weights, and the config.json of Llama 3 8B."""

import json
from pathlib import Path
from typing import Any

from stages.checkpoints.families import ARCHITECTURES

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}


def make(directory: Path, **changes: Any) -> Path:
    """Write a small checkpoint without weights: CONFIG with changes."""
    declared = (changes.get("architectures") or CONFIG["architectures"])[0]
    config = CONFIG | {"model_type": ARCHITECTURES.get(declared, "other")} | changes
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory
