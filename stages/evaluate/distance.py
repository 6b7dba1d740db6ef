"""Distances between the baseline's and the candidate's distributions over the whole vocabulary, per decode step.

Legend: B = rows, V = vocab_size. Sums are in float64, because a KL of 1e-7 is a difference of terms near 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

TOP_K = 10


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of scored tokens; every array has shape (tokens,). A step with a non-finite logit is NaN."""

    kl: Array
    """KL divergence of the candidate from the baseline, in nats."""
    baseline_nll: Array
    """Negative log-likelihood of the reference token under the baseline, in nats."""
    candidate_nll: Array
    """The same under the candidate."""
    top1: Array
    """1.0 where both find the same token most likely, else 0.0."""
    top10: Array
    """Share of the baseline's TOP_K most likely tokens that are among the candidate's."""
    delta_p: Array
    """Probability of the reference token under the candidate, less that under the baseline."""
    greedy: npt.NDArray[np.int64]
    """The candidate's most likely token, -1 where its logits are not finite."""

    @classmethod
    def empty(cls, tokens: int) -> "StepStatistics":
        """Return statistics of `tokens` tokens that are all still to be written."""
        kl, baseline_nll, candidate_nll, top1, top10, delta_p = np.full((6, tokens), np.nan)
        greedy = np.full(tokens, -1, dtype=np.int64)
        return cls(kl, baseline_nll, candidate_nll, top1, top10, delta_p, greedy)

    def part(self, start: int, stop: int) -> "StepStatistics":
        """Return views of the tokens from `start` up to `stop`."""
        return StepStatistics(*(getattr(self, item.name)[start:stop] for item in fields(self)))

    @classmethod
    def joined(cls, parts: "Sequence[StepStatistics]") -> "StepStatistics":
        """Return the tokens of all parts, one part after the other."""
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))

    def put(self, index: npt.NDArray[np.int64], step: "StepStatistics") -> None:
        """Write the rows of `step` at `index`."""
        for item in fields(self):
            getattr(self, item.name)[index] = getattr(step, item.name)


def log_softmax(logits_BV: npt.NDArray[np.float32]) -> Array:
    """Return natural-log probabilities in float64; a row with a non-finite logit becomes NaN."""
    logits = logits_BV.astype(np.float64)
    non_finite = ~np.isfinite(logits).all(axis=1)
    logits[non_finite] = 0.0
    logp = logits - logits.max(axis=1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
    logp[non_finite] = np.nan
    return np.asarray(logp)


def _top_mask(logp_BV: Array, k: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(logp_BV.shape, dtype=bool)
    np.put_along_axis(mask, np.argpartition(logp_BV, -k, axis=1)[:, -k:], True, axis=1)
    return mask


def compare(baseline_BV: npt.NDArray[np.float32], candidate_BV: Array, tokens: list[int]) -> StepStatistics:
    """Compare the candidate's log-probabilities with the baseline's.

    Args:
        baseline_BV: The baseline's log-probabilities as they are stored.
        candidate_BV: The candidate's, as `log_softmax` returns them.
        tokens: The reference token of each row (B).

    Returns:
        Statistics of B tokens.
    """
    baseline = baseline_BV.astype(np.float64)
    # In float32 the stored probabilities sum to 1 within a few 1e-8 only, which alone could make a KL negative.
    baseline -= np.log(np.exp(baseline).sum(axis=1, keepdims=True))
    kl = (np.exp(baseline) * (baseline - candidate_BV)).sum(axis=1)
    k = min(TOP_K, baseline.shape[1])
    overlap = (_top_mask(baseline, k) & _top_mask(candidate_BV, k)).sum(axis=1) / k
    rows = np.arange(len(tokens))
    baseline_token, candidate_token = baseline[rows, tokens], candidate_BV[rows, tokens]
    non_finite = np.isnan(candidate_token)
    greedy = candidate_BV.argmax(axis=1)
    return StepStatistics(
        kl=np.maximum(kl, 0.0),  # propagates NaN
        baseline_nll=-baseline_token,
        candidate_nll=-candidate_token,
        top1=np.where(non_finite, np.nan, baseline.argmax(axis=1) == greedy),
        top10=np.where(non_finite, np.nan, overlap),
        delta_p=np.exp(candidate_token) - np.exp(baseline_token),
        greedy=np.where(non_finite, -1, greedy),
    )
