"""How far one distribution over the vocabulary is from another, per decode step, from full distributions.

Legend: B = rows, V = vocab_size. Sums are in float64: a KL of 1e-7 is a difference of terms near 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

TOP_K = 10


@dataclass(frozen=True)
class StepStatistics:
    """One value per scored token, shape (tokens,). `greedy` is the candidate's most likely token."""

    kl: Array
    baseline_nll: Array
    candidate_nll: Array
    top1: Array
    top10: Array
    delta_p: Array
    greedy: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, tokens: int) -> "StepStatistics":
        kl, before, after, top1, top10, delta_p = np.full((6, tokens), np.nan)
        return cls(kl, before, after, top1, top10, delta_p, np.full(tokens, -1, dtype=np.int64))

    def part(self, start: int, stop: int) -> "StepStatistics":
        """Tokens `start` to `stop`, as views."""
        return StepStatistics(*(getattr(self, item.name)[start:stop] for item in fields(self)))

    @classmethod
    def joined(cls, parts: "Sequence[StepStatistics]") -> "StepStatistics":
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))

    def put(self, index: npt.NDArray[np.int64], step: "StepStatistics") -> None:
        """Write the rows of `step` at `index`."""
        for item in fields(self):
            getattr(self, item.name)[index] = getattr(step, item.name)


def log_softmax(logits_BV: npt.NDArray[np.float32]) -> Array:
    """Natural-log probabilities in float64; a row with a non-finite logit becomes NaN."""
    logits = logits_BV.astype(np.float64)
    broken = ~np.isfinite(logits).all(axis=1)
    logits[broken] = 0.0
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    shifted[broken] = np.nan
    return np.asarray(shifted)


def _top_mask(logp_BV: Array, k: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(logp_BV.shape, dtype=bool)
    np.put_along_axis(mask, np.argpartition(logp_BV, -k, axis=1)[:, -k:], True, axis=1)
    return mask


def compare(baseline_BV: npt.NDArray[np.float32], candidate_BV: Array, tokens: list[int]) -> StepStatistics:
    """Statistics of stored baseline log-probabilities against the candidate's, at the reference `tokens` (B)."""
    base = baseline_BV.astype(np.float64)
    # float32 storage leaves the probabilities a few 1e-8 off one, which alone could make a KL negative
    base -= np.log(np.exp(base).sum(axis=1, keepdims=True))
    kl = (np.exp(base) * (base - candidate_BV)).sum(axis=1)
    k = min(TOP_K, base.shape[1])
    shared = (_top_mask(base, k) & _top_mask(candidate_BV, k)).sum(axis=1) / k
    rows = np.arange(len(tokens))
    base_token, candidate_token = base[rows, tokens], candidate_BV[rows, tokens]
    broken = np.isnan(candidate_token)
    greedy = candidate_BV.argmax(axis=1)
    return StepStatistics(
        kl=np.maximum(kl, 0.0),  # propagates NaN
        baseline_nll=-base_token,
        candidate_nll=-candidate_token,
        top1=np.where(broken, np.nan, base.argmax(axis=1) == greedy),
        top10=np.where(broken, np.nan, shared),
        delta_p=np.exp(candidate_token) - np.exp(base_token),
        greedy=np.where(broken, -1, greedy),
    )
