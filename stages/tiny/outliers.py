"""Plants outliers in the keys of the tiny model, without changing the function that it computes.

Keys of real models have a few channels many times larger than the rest, which is why 4-bit keys with one scale per token
fail there. In the layers of the tiny model that retrieve, no such channel appears by itself: the largest is less than twice
the median one. One rotary channel pair of their keys is therefore scaled up, and the matching query rows are scaled down by
the same power of two. Both halves of a pair (channels i and i + head_dim / 2) share the factor, because RoPE mixes them.
Every product q * k, and so every logit, stays bit for bit what it was.
"""

from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM


class Outlier(NamedTuple):
    """One scaled rotary pair."""

    layer: int
    kv_head: int
    pair: int
    exponent: int
    """The channels of the keys are 2 ** exponent times as large as trained, those of the queries 2 ** -exponent times."""


OUTLIERS = tuple(Outlier(layer, kv_head, pair=20, exponent=3) for layer in (2, 3) for kv_head in (0, 1))
"""Layers 2 and 3 do the retrieving. Pair 20 turns once in about 35,000 tokens: the outliers of real models are in slow
pairs, too."""


@torch.no_grad()
def _scale_pairs(model: LlamaForCausalLM, sign: int) -> None:
    config = model.config
    head_dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for outlier in OUTLIERS:
        attention = model.model.layers[outlier.layer].self_attn
        factor = 2.0 ** (sign * outlier.exponent)
        for channel in (outlier.pair, outlier.pair + head_dim // 2):
            attention.k_proj.weight[outlier.kv_head * head_dim + channel] *= factor
            for head in range(outlier.kv_head * group, (outlier.kv_head + 1) * group):
                attention.q_proj.weight[head * head_dim + channel] /= factor


def plant_outliers(model: LlamaForCausalLM) -> None:
    """Scale the keys up and the queries down, in place."""
    _scale_pairs(model, 1)


def remove_outliers(model: LlamaForCausalLM) -> None:
    """Undo `plant_outliers`, in place; exact for a model whose planted weights were stored in fp16."""
    _scale_pairs(model, -1)
