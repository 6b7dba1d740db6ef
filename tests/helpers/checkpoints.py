"""Random models as checkpoints, and a config.json by itself."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

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


def save_checkpoint(model: PreTrainedModel, directory: Path, max_shard_size: str = "5GB") -> None:
    """Write config.json and the weights; no tokenizer."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
