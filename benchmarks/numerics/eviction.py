"""Attention on the first tokens, and what is lost when all but the first and the latest are evicted."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.numerics.measure import Bench
from benchmarks.numerics.subject import Text
from stages.evaluate.distances.distance import StepStatistics

TOKENS = 1024
"""Tokens at the beginning of each document: one mask over a long document would be as large as its square."""


def first_tokens_share(bench: Bench, tokens: Sequence[int], first: int = 4) -> float:
    """Return the attention on the first tokens relative to their share of evenly spread attention.

    The mean is over layers, heads, and the queries of the later half.

    Args:
        bench: The model.
        tokens: Token ids of one document.
        first: How many tokens count as first.
    """
    config, ids = bench.model.config, torch.tensor([list(tokens)])
    implementation = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            attentions = bench.model(ids, output_attentions=True).attentions
    finally:
        config._attn_implementation = implementation
    half = len(tokens) // 2
    evenly = (first / torch.arange(half + 1, len(tokens) + 1)).mean().item()
    return float(np.mean([layer[0, :, half:, :first].sum(-1).mean().item() for layer in attentions])) / evenly


def evicted(bench: Bench, sinks: int, window: int) -> list[StepStatistics]:
    """Score the beginning of every document with only its first `sinks` and latest `window - sinks` tokens visible.

    Tokens keep their positions.
    """
    steps = []
    for whole in bench.texts:
        count = min(len(whole.tokens), TOKENS - 1)
        text = replace(whole, tokens=whole.tokens[:count], targets=whole.targets[: count - whole.first])
        scored = partial(_logits, bench, text, sinks, window)
        steps.append(bench.compare(text, ["evicted", sinks, window], scored))
    return steps


def _logits(bench: Bench, text: Text, sinks: int, window: int) -> npt.NDArray[np.float32]:
    row = torch.arange(len(text.tokens))
    age = row[:, None] - row
    visible = (age >= 0) & ((row < sinks) | (age < window - sinks))
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = bench.model(torch.tensor([list(text.tokens)]), attention_mask=mask).logits[0, text.first :]
    array: npt.NDArray[np.float32] = logits.numpy()
    return array
