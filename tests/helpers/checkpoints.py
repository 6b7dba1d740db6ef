"""Random models as checkpoints that kvgate accepts, whichever transformers wrote them."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from pipeline.checkpoint.description import rope_at_top_level


def save_checkpoint(model: PreTrainedModel, directory: Path, max_shard_size: str = "5GB") -> None:
    """Write config.json and the weights; no tokenizer."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    config = directory / "config.json"
    config.write_text(json.dumps(rope_at_top_level(json.loads(config.read_text()))))
