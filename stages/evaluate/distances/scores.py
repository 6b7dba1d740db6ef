"""Storage format of the baseline's distributions, which are stored as heads.

A head lists the most likely tokens with their log-probabilities until all other tokens have less than REST_MASS. Its length
depends on the distribution: tens of tokens if the model is certain, thousands if it is uncertain. A head has at most
vocab_size / 8 tokens (LEAST_CAP for small vocabularies).

`logprobs.safetensors` holds the arrays of `SampleHeads` for each sample, named `<id>/<array>`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from stages.evaluate.distances.distance import Distributions, Head, Tokens


@dataclass(frozen=True)
class SampleHeads:
    """The concatenated heads of a sample's N scored tokens."""

    offsets: npt.NDArray[np.int64]
    """Boundaries (N + 1): head n is tokens[offsets[n] : offsets[n + 1]]."""
    tokens: Tokens
    logp: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float64]
    """Mass of the rest (N)."""
    reference: npt.NDArray[np.float64]
    """Log-probabilities of the reference tokens (N)."""

    @classmethod
    def of(cls, heads: Sequence[Head]) -> "SampleHeads":
        """Join the heads of a sample's scored tokens."""
        return cls(
            offsets=np.cumsum([0, *(len(head.tokens) for head in heads)], dtype=np.int64),
            tokens=np.concatenate([head.tokens for head in heads]),
            logp=np.concatenate([head.logp for head in heads]),
            rest=np.array([head.rest for head in heads]),
            reference=np.array([head.reference for head in heads]),
        )

    def head(self, position: int) -> Head:
        """Return the head of a scored token."""
        part = slice(self.offsets[position], self.offsets[position + 1])
        return Head(self.tokens[part], self.logp[part], float(self.rest[position]), float(self.reference[position]))


HEAD_ARRAYS = tuple(item.name for item in fields(SampleHeads))

Heads = Callable[[str], SampleHeads]
"""Returns the baseline's heads of a sample, given the sample's id."""


def head_of(distributions: Distributions, row: int, token: int) -> Head:
    """Return the head of a row. `token`: the reference token. All values are NaN if a logit is not finite."""
    logits = distributions.logits_BV[row]
    ids = np.uint16 if len(logits) <= 1 << 16 else np.uint32
    if not distributions.finite[row]:
        return Head(np.zeros(1, ids), np.full(1, np.nan, np.float32), np.nan, np.nan)
    tokens = distributions.head(row)
    logp, rest, log_sum = distributions.split(row, tokens)
    return Head(tokens.astype(ids), logp.astype(np.float32), rest, float(logits[token]) - log_sum)


def write_heads(path: Path, samples: Iterable[tuple[str, SampleHeads]]) -> None:
    """Write pairs of a sample's id and its heads."""
    save_file({f"{name}/{array}": getattr(heads, array) for name, heads in samples for array in HEAD_ARRAYS}, str(path))


def stored_heads(path: Path) -> Heads:
    """Return a function that reads the heads of a sample from a file of `write_heads`."""
    file: Any = safe_open(str(path), framework="numpy")
    return lambda name: SampleHeads(*(file.get_tensor(f"{name}/{array}") for array in HEAD_ARRAYS))
