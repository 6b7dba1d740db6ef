"""The tiny model with its keys in three scalings, which all compute the same function bit for bit."""

from pathlib import Path
from typing import Literal

import torch
from transformers import LlamaForCausalLM

from stages.tiny.outliers import remove_outliers
from stages.tiny.scores import CHECKPOINT

Variant = Literal["shipped", "natural", "loud"]
"""shipped: with planted outlier channels; natural: without them, as trained; loud: shipped, with all keys LOUD times larger."""

LOUD = 16
"""Factor of the loud variant's keys, a power of two so that products with the queries stay the same bits."""


def load(variant: Variant, checkpoint: Path = CHECKPOINT) -> LlamaForCausalLM:
    """Load the checkpoint in float32 and rescale its keys."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if variant == "natural":
        remove_outliers(model)
    if variant == "loud":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight *= LOUD
                layer.self_attn.q_proj.weight /= LOUD
    return model
