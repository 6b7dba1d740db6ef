"""The test of every judged figure: a betting confidence sequence of a mean over documents.

Documents are independent, the samples of one document are not. Each document has a value x; larger is worse. Against
the hypothesis "the mean is at the limit or above" a **score** starts at 1, and each document multiplies it by
`1 + stake (limit - x)`. Under the hypothesis the expected score never grows, and it stays above 0 while x lies in the range
that the stake was chosen for. By Ville's inequality it then ever reaches 1 / alpha with a probability of at most alpha: at any
look, however many looks there are, and if more documents are added later. The mean passes at that score, and the bound
is the limit that the same score would just reject. A score with the sign reversed fails the mean. A few stakes are averaged, so
that the score does not depend on the order of the documents. Source: Waudby-Smith and Ramdas, JRSS B 86 (2024) 1-27.

A document outside of the range of a stake ends that stake: its part of the score is 0 from then on. Where the range is known
(distances and shares, which are at least 0 and are cut above) the level is exact; where it is assumed (what one document may
lose or gain of recovery, answers, likelihood and accepted drafts), `python -m benchmarks.gates` simulates what it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

OUTLIER = 3.0
"""A document counts at most as this many times the limit where a mean has to pass, and a request whose KL is above that is
ruined: no mean of such heavy tails can be bounded otherwise. With 4, 15 documents would not show a top-10 overlap as good as
FP8's."""
PASS_STAKES = (0.9, 0.4)
"""Stakes on a mean below the limit, as shares of the largest that the range allows. A sound engine is far below the limit."""
WHOLE_STAKES = (1.0, 0.15)
"""The same where documents count whole. The first is for few documents, and a document worse than its range ends it."""
FAIL_STAKES = (0.1, 0.2, 0.4, 0.9)
"""Stakes on a mean above the limit, where a few documents may have nearly all of it."""
MANY = 36
"""Documents from which on Student's t is used: fewer may not show what makes them skewed."""
POWER = 0.9
"""Probability with which as many documents as `Mean.needed` says decide."""
HALVINGS = 14


def document_sums(documents: Sequence[str], *columns: npt.ArrayLike) -> list[Array]:
    """Return each document's sum of every column of the samples, shape (documents,)."""
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    return [np.asarray(np.bincount(index, weights=np.asarray(column)), np.float64) for column in columns]


def by_document(values: Sequence[float | None], weights: Sequence[float], documents: Sequence[str]) -> Array:
    """Return each document's weighted mean, shape (documents,); NaN where a value is missing."""
    with np.errstate(over="ignore"):  # a sum that no float64 holds is infinite, which fails a gate
        sums, total = document_sums(documents, np.asarray(values, np.float64) * np.asarray(weights), weights)
        return sums / total


def document_totals(values: Sequence[float | None], documents: Sequence[str]) -> Array:
    """Return each document's sum, over the mean size of a document, shape (documents,); NaN where a value is missing.

    The mean of these is the mean of all samples.
    """
    (totals,) = document_sums(documents, np.asarray(values, np.float64))
    return np.asarray(totals * len(totals) / len(values))


def log_score(gains: Array, stakes: Sequence[float]) -> Array:
    """Return the log of the score, the mean over `stakes`: (..., documents) -> (...).

    `gains` are what each document adds at a stake of 1.
    """
    logs = [_steps(gains, stake).sum(axis=-1) for stake in stakes]
    return np.asarray(np.logaddexp.reduce(logs) - math.log(len(stakes)))


def _steps(gains: Array, stake: float) -> Array:
    with np.errstate(divide="ignore"):  # a stake that ended
        return np.asarray(np.log1p(np.maximum(stake * gains, -1.0)))


@dataclass(frozen=True)
class Result:
    """What a test says, and the one-sided bound that says so."""

    decision: Literal["PASS", "FAIL"] | None
    """None where the figure is neither clearly within the limit nor clearly outside."""
    value: float
    bound: float
    level: float
    """The test's own: of a FAIL, or else of a PASS."""


@dataclass(frozen=True)
class Mean:
    """A mean over documents that has a limit, which is above 0; larger is worse."""

    values: Array
    """Of each document."""
    limit: float
    best: float = 0.0
    """The best value that the stakes on a FAIL allow for."""
    worst: float = math.nan
    """The worst value that the stakes on a PASS allow for; by default OUTLIER times the limit."""
    whole: bool = False
    """Whether documents that are worse count whole where the mean has to pass; otherwise they count as `worst`."""

    @property
    def cap(self) -> float:
        """The worst value that the stakes on a PASS allow for."""
        return OUTLIER * self.limit if math.isnan(self.worst) else self.worst

    @property
    def stakes(self) -> tuple[float, ...]:
        """Stakes on a PASS."""
        return WHOLE_STAKES if self.whole else PASS_STAKES

    def pass_gains(self, limit: float) -> Array:
        """Return what each document adds to a bet that the mean is below `limit`; a document gains at most the limit."""
        kept = np.maximum(self.values if self.whole else np.minimum(self.values, self.cap), -self.limit)
        return np.asarray((limit - kept) / (self.cap - self.limit))

    def fail_gains(self, limit: float) -> Array:
        """Return what each document adds to a bet that the mean is above `limit`."""
        return np.asarray((self.values - limit) / (self.limit - self.best))

    def fails(self, level: float) -> bool:
        """Return whether the mean, with outliers whole, is clearly above the limit or not finite."""
        finite = bool(np.isfinite(self.values).all())
        return not finite or bool(log_score(self.fail_gains(self.limit), FAIL_STAKES) >= -math.log(level))

    def test(self, fail_level: float, pass_level: float, t_level: float = 0.0) -> Result:
        """Return FAIL where the mean is clearly above the limit, PASS where it is clearly below.

        With a `t_level`, MANY documents also PASS where Student's t shows at that level what the bet leaves open.
        """
        if not np.isfinite(self.values).all():
            return Result("FAIL", math.nan, math.nan, fail_level)
        mean = float(self.values.mean())
        if self.fails(fail_level):
            enough = -math.log(fail_level)
            found = _crossing(mean, -1.0, lambda limit: bool(log_score(self.fail_gains(limit), FAIL_STAKES) >= enough))
            return Result("FAIL", mean, max(found, self.limit), fail_level)
        enough = -math.log(pass_level)
        passes = bool(log_score(self.pass_gains(self.limit), self.stakes) >= enough)
        value = mean if self.whole else float(np.minimum(self.values, self.cap).mean())
        bound = _crossing(value, 1.0, lambda limit: bool(log_score(self.pass_gains(limit), self.stakes) >= enough))
        if not self.whole:
            bound = min(bound, self.cap)
        if t_level and not passes and len(self.values) >= MANY:
            by_t = float(skewed_upper_bound(self.values, t_level))
            passes, bound = by_t <= self.limit, min(bound, by_t)
        return Result("PASS" if passes else None, value, min(bound, self.limit) if passes else bound, pass_level + t_level)

    def needed(self, level: float, most: int, t_level: float = 0.0) -> int:
        """Return about how many documents like these decide with a probability of POWER; `most` where no number does."""
        sides = ((self.pass_gains(self.limit), self.stakes), (self.fail_gains(self.limit), FAIL_STAKES))
        counts = [
            _documents_to_reach(_steps(gains, stake), math.log(len(stakes) / level))
            for gains, stakes in sides
            for stake in stakes
        ]
        gap = self.limit - float(self.values.mean())
        if t_level and gap > 0:
            quantiles = NormalDist().inv_cdf(1 - t_level) + NormalDist().inv_cdf(POWER)
            counts.append(max(MANY, math.ceil(min(most, (quantiles * float(self.values.std()) / gap) ** 2))))
        return int(min(most, *counts))


def can_pass(documents: int, level: float) -> bool:
    """Return whether so many documents are enough for a mean that is 0."""
    return Mean(np.zeros(documents), 1.0).test(level, level).decision == "PASS"


def skewed_upper_bound(values: Array, alpha: float) -> Array:
    """Return the one-sided 1 - alpha upper bound of a mean by Student's t, transformed for skewed values: (..., n) -> (...).

    The values are many. Plain t errs more often where a few of them have most of the loss. Source: Hall, JRSS B 54 (1992) 221.
    """
    from scipy.special import stdtrit

    n, mean, spread = values.shape[-1], values.mean(axis=-1), values.std(axis=-1, ddof=1)
    scale = np.where(spread > 0, spread, 1.0)
    skew = (((values - mean[..., None]) / scale[..., None]) ** 3).mean(axis=-1)
    score = stdtrit(n - 1, alpha) / math.sqrt(n) - skew / (6 * n)
    # Hall's cubic of the score, solved for the limit; without skew it is the score.
    slope = np.where(np.abs(skew) < 1e-6, 1.0, skew)
    solved = np.where(np.abs(skew) < 1e-6, score, 3 / slope * (np.cbrt(1 + slope * score) - 1))
    return np.asarray(mean - spread * solved)


def _documents_to_reach(steps: Array, enough: float) -> float:
    """Return about how many steps like these reach `enough` with a probability of POWER; infinite where they do not grow."""
    growth = float(steps.mean())
    if not growth > 0:
        return math.inf
    spread = NormalDist().inv_cdf(POWER) * float(steps.std())
    return math.ceil(((spread + math.sqrt(spread * spread + 4 * growth * enough)) / (2 * growth)) ** 2)


def _crossing(mean: float, direction: float, rejected: Callable[[float], bool]) -> float:
    """Return the limit nearest to the mean, above it or below, that is rejected; those farther away are, too."""
    step = max(abs(mean), 1e-6)
    while not rejected(mean + direction * step):
        step *= 2
    inside, outside = mean, mean + direction * step
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
    return outside
