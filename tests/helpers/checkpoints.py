"""Random models as checkpoints."""

from pathlib import Path

from transformers import PreTrainedModel


def save_checkpoint(model: PreTrainedModel, directory: Path, max_shard_size: str = "5GB") -> None:
    """Write config.json and the weights; no tokenizer."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
