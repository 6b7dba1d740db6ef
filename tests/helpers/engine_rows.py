"""Texts that real libraries are asked, and how far their rows of logits are from the oracle's."""

from pathlib import Path

import numpy as np
import pytest

from stages.checkpoints import load_tokenizer
from stages.evaluate.distances.distance import kl_of_rows
from stages.workloads import generate

KNOWN_LAYOUT = pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    reason="vLLM takes its AMX kernels on this processor, and only the layout of its `vec` kernels is known",
)


def two_stories(checkpoint: Path) -> list[list[int]]:
    """Return the tokens of two stories, 160 and 100 of them."""
    tokenizer = load_tokenizer(checkpoint)
    stories = [tokenizer(sample.prompt or sample.reference)["input_ids"] for sample in generate("prose", 40, 0)]
    long = [story for story in stories if len(story) >= 160]
    return [long[0][:160], long[1][:100]]


def mean_kl(expected: np.ndarray, rows: np.ndarray) -> float:
    return float(np.mean([kl_of_rows(a, b[None])[0] for a, b in zip(expected, rows, strict=True)]))
