"""Rescalings of a model's keys that leave its function as it is, bit for bit."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from stages.checkpoints import load_causal_lm

LOUD = 16
"""Factor of the loud variant's keys, a power of two so that products with the queries stay the same bits."""


def load(checkpoint: Path) -> LlamaForCausalLM:
    """Load a checkpoint in float32."""
    model: LlamaForCausalLM = load_causal_lm(checkpoint, dtype=torch.float32)
    return model


@torch.no_grad()
def make_loud(model: LlamaForCausalLM) -> None:
    """Make all keys LOUD times larger and the queries smaller."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight *= LOUD
        layer.self_attn.q_proj.weight /= LOUD
