"""Distances between the baseline's and the candidate's next-token distributions, per decode step.

An evaluation compares truncated distributions (`LogProbs`). The baseline's most likely tokens are separate outcomes, and all
other tokens are one outcome, the rest. By the data processing inequality, their KL never exceeds the KL over the vocabulary.
The difference is the mass of the rest times the KL within the rest. `kl_of_logits` computes the KL over the vocabulary, against
which the truncated KL is checked.

A file of log-probabilities holds the arrays of `SampleLogProbs` for each sample, named `<id>/<array>`. The number of kept
tokens depends on the distribution: tens if the model is certain, thousands if it is uncertain.

Legend: B = rows, V = vocab_size, K = kept tokens. Sums are in float64, because a KL of 1e-7 is a difference of terms
near 1. Exponentials over the vocabulary are in float32, because they affect only the mass of the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

Array = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.unsignedinteger]

TOP_K = 10

REST_MASS = 1e-4
"""Maximum probability mass of the rest. A very flat distribution reaches the cap (`max_kept_tokens`) first."""

MIN_CAP = 1024
"""Lower limit of the cap, so that a small vocabulary may be kept completely."""

ROWS_AT_ONCE = 16
"""Rows per block of `kl_of_logits`, which limits its memory: it computes in float64."""

MIN_REST_MASS = 1e-15
"""Lower bound of the rest's mass. The mass is a difference of two sums near 1, so smaller values are rounding errors."""


V = TypeVar("V")


class Statistics(NamedTuple, Generic[V]):
    """Statistics of a scored token, or of several tokens as arrays of shape (tokens,). Files hold a row per field.

    A non-finite candidate logit makes all but `baseline_nll` NaN.
    """

    kl: V
    """KL divergence of the candidate from the baseline, in nats."""
    baseline_nll: V
    """Negative log-likelihood of the reference token under the baseline, in nats."""
    candidate_nll: V
    """Negative log-likelihood of the reference token under the candidate, in nats."""
    top1: V
    """1.0 if both engines have the same most likely token, else 0.0."""
    top10: V
    """Share of the baseline's TOP_K most likely tokens that are among the candidate's."""


TokenStatistics = Statistics[float]
StepStatistics = Statistics[Array]


def collect_statistics(tokens: Sequence[TokenStatistics]) -> StepStatistics:
    return StepStatistics(*np.array(tokens, np.float64).reshape(-1, len(Statistics._fields)).T.copy())


def join_statistics(parts: Sequence[StepStatistics]) -> StepStatistics:
    return StepStatistics(*np.concatenate(parts, axis=1))


class MassSplit(NamedTuple):
    """The probability mass of a row, split between some tokens and the rest."""

    logp: Array
    """Log-probabilities (K) of the tokens."""
    rest: float
    log_sum: float
    """Log-sum-exp of the row."""


class Distributions:
    def __init__(self, logits_BV: npt.NDArray[np.float32]) -> None:
        self.logits_BV = logits_BV
        peaks = logits_BV.max(axis=1, keepdims=True)
        self.finite = np.isfinite(peaks[:, 0]) & np.isfinite(logits_BV.min(axis=1))
        """Whether all logits of a row are finite."""
        with np.errstate(invalid="ignore"):
            self._weights_BV = np.exp(logits_BV - peaks)
        self._peaks = peaks[:, 0].astype(np.float64)
        self._totals = self._weights_BV.sum(axis=1, dtype=np.float64)

    def split(self, row: int, tokens: npt.NDArray[np.integer]) -> MassSplit:
        """Split the mass of a finite row between distinct `tokens` (K) and the rest."""
        logits = self.logits_BV[row, tokens].astype(np.float64) - self._peaks[row]
        rest = 0.0
        if len(tokens) < self.logits_BV.shape[1]:
            rest = max(float(self._totals[row] - self._weights_BV[row, tokens].sum(dtype=np.float64)), MIN_REST_MASS)
        total = float(np.exp(logits).sum()) + rest
        log_total = float(np.log(total))
        return MassSplit(logp=logits - log_total, rest=rest / total, log_sum=self._peaks[row] + log_total)

    def top_tokens(self, row: int) -> npt.NDArray[np.integer]:
        """Return the most likely tokens: the fewest that leave at most REST_MASS, but at least TOP_K and at most the cap."""
        logits = self.logits_BV[row]
        vocab = len(logits)
        min_count = min(TOP_K, vocab)
        cap = max_kept_tokens(vocab)
        # All tokens below this logit together have less than REST_MASS.
        lowest = self._peaks[row] + np.log(self._totals[row] * REST_MASS / vocab)
        tokens = np.flatnonzero(logits >= lowest)
        if not min_count <= len(tokens) <= cap:
            count = min(max(len(tokens), min_count), cap)
            tokens = np.flatnonzero(logits >= np.partition(logits, vocab - count)[vocab - count])
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")][:cap]  # ties with the last token exceed the cap
        tail = self._totals[row] - np.cumsum(self._weights_BV[row, tokens], dtype=np.float64)
        enough = int(np.searchsorted(-tail, -REST_MASS * self._totals[row])) + 1
        return tokens[: max(min_count, enough)]


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Truncated distribution of the next token."""

    tokens: Tokens
    """Token ids (K), most likely first."""
    logp: npt.NDArray[np.float32]
    """Log-probabilities (K) of the tokens."""
    rest: float
    """Probability mass of all other tokens."""
    reference: float
    """Log-probability of the reference token, which may be in the rest."""


def max_kept_tokens(vocab_size: int) -> int:
    return min(vocab_size, max(vocab_size // 8, MIN_CAP))


@dataclass(frozen=True, kw_only=True)
class SampleLogProbs:
    """The concatenated log-probabilities of a sample's N scored tokens."""

    offsets: npt.NDArray[np.int64]
    """Boundaries (N + 1): scored token n has tokens[offsets[n] : offsets[n + 1]]."""
    tokens: Tokens
    logp: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float64]
    """Mass of the rest (N)."""
    reference: npt.NDArray[np.float64]
    """Log-probabilities of the reference tokens (N)."""

    @classmethod
    def concatenate(cls, logprobs: Sequence[LogProbs]) -> "SampleLogProbs":
        return cls(
            offsets=np.cumsum([0, *(len(token.tokens) for token in logprobs)], dtype=np.int64),
            tokens=np.concatenate([token.tokens for token in logprobs]),
            logp=np.concatenate([token.logp for token in logprobs]),
            rest=np.array([token.rest for token in logprobs]),
            reference=np.array([token.reference for token in logprobs]),
        )

    def at(self, position: int) -> LogProbs:
        part = slice(self.offsets[position], self.offsets[position + 1])
        return LogProbs(
            tokens=self.tokens[part],
            logp=self.logp[part],
            rest=float(self.rest[position]),
            reference=float(self.reference[position]),
        )


LOGPROB_ARRAYS = tuple(item.name for item in fields(SampleLogProbs))

LogProbsReader = Callable[[str], SampleLogProbs]
"""Function that returns the stored log-probabilities of a sample, given the sample's id."""


def truncate_row(distributions: Distributions, row: int, token: int) -> LogProbs:
    """Truncate the distribution of a row. `token`: the reference token. All values are NaN if a logit is not finite."""
    logits = distributions.logits_BV[row]
    ids = np.uint16 if len(logits) <= 1 << 16 else np.uint32
    if not distributions.finite[row]:
        return LogProbs(tokens=np.zeros(1, ids), logp=np.full(1, np.nan, np.float32), rest=np.nan, reference=np.nan)
    tokens = distributions.top_tokens(row)
    split = distributions.split(row, tokens)
    logp = split.logp.astype(np.float32)
    return LogProbs(tokens=tokens.astype(ids), logp=logp, rest=split.rest, reference=float(logits[token]) - split.log_sum)


def write_logprobs(path: Path, samples: Mapping[str, SampleLogProbs]) -> None:
    arrays = {f"{name}/{array}": getattr(sample, array) for name, sample in samples.items() for array in LOGPROB_ARRAYS}
    save_file(arrays, str(path))


def stored_logprobs(path: Path) -> LogProbsReader:
    file: Any = safe_open(str(path), framework="numpy")
    return lambda name: SampleLogProbs(**{array: file.get_tensor(f"{name}/{array}") for array in LOGPROB_ARRAYS})


def _kl(baseline: LogProbs, candidate: MassSplit) -> float:
    """Return the KL. `candidate`: the candidate's row, split between the baseline's tokens and the rest."""
    logp = baseline.logp.astype(np.float64)
    # Stored probabilities sum to 1 only within a few 1e-8. This error alone could make a KL negative.
    total = float(np.exp(logp).sum()) + baseline.rest
    logp -= np.log(total)
    rest = baseline.rest / total
    kl = float((np.exp(logp) * (logp - candidate.logp)).sum())
    if rest > 0:
        kl += rest * float(np.log(rest / candidate.rest))
    return max(kl, 0.0) if np.isfinite(kl) else float("nan")


def compare_logprobs(baseline: LogProbs, candidate: Distributions, row: int, token: int, greedy: int) -> TokenStatistics:
    """Compare a row of the candidate with the baseline's. `greedy`: the candidate's most likely token."""
    if not candidate.finite[row]:
        return TokenStatistics(kl=np.nan, baseline_nll=-baseline.reference, candidate_nll=np.nan, top1=np.nan, top10=np.nan)
    split = candidate.split(row, baseline.tokens)
    logits = candidate.logits_BV[row]
    k = min(TOP_K, len(logits))
    # A token is among the k most likely tokens if fewer than k tokens are more likely.
    likelier = (logits[None, :] > logits[baseline.tokens[:k], None]).sum(axis=1)
    candidate_token = float(logits[token]) - split.log_sum
    return TokenStatistics(
        kl=_kl(baseline, split),
        baseline_nll=-baseline.reference,
        candidate_nll=-candidate_token,
        top1=float(int(baseline.tokens[0]) == greedy),
        top10=float((likelier < k).sum()) / k,
    )


def kl_of_logits(exact_BV: npt.NDArray[np.float32], other_BV: npt.NDArray[np.float32]) -> Array:
    """Return the KL of `other_BV` from `exact_BV` over the whole vocabulary, (B) in nats; infinite if a logit is not finite."""
    from scipy.special import log_softmax

    rows = []
    with np.errstate(invalid="ignore"):  # a logit that is not finite makes the sum of its row NaN or infinite
        for first in range(0, len(exact_BV), ROWS_AT_ONCE):
            parts = (x[first : first + ROWS_AT_ONCE].astype(np.float64) for x in (exact_BV, other_BV))
            logp, logq = (log_softmax(part, axis=1) for part in parts)
            rows.append((np.exp(logp) * (logp - logq)).sum(axis=1))
    kl = np.concatenate(rows)
    return np.where(np.isfinite(kl), np.maximum(kl, 0.0), np.inf)
