"""The tiny model in three scalings of its keys that compute the same function, bit for bit."""

from pathlib import Path
from typing import Literal

import torch
from transformers import LlamaForCausalLM

from stages.tiny.outliers import remove_outliers
from stages.tiny.scores import CHECKPOINT

Variant = Literal["shipped", "natural", "loud"]
"""shipped: with its planted outlier channels; natural: without them, as trained; loud: shipped, all keys LOUD times larger."""

LOUD = 16


def load(variant: Variant, checkpoint: Path = CHECKPOINT) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if variant == "natural":
        remove_outliers(model)
    if variant == "loud":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight *= LOUD  # a power of two: products with the queries stay what they were
                layer.self_attn.q_proj.weight /= LOUD
    return model
