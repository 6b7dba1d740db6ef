"""The test of every judged figure: a betting confidence sequence for a mean over documents.

Documents are independent; samples within a document are not. Each document has a value x; larger is worse. To test the
hypothesis "the mean is at the limit or above", a **score** starts at 1, and each document multiplies it by
`1 + stake (limit - x)`. Under the hypothesis the expected score never grows. The score stays positive while x lies in the range
that the stake was chosen for. By Ville's inequality the score then reaches 1 / alpha with a probability of at most alpha. This
covers all looks together, regardless of their number and of documents that are added later. The mean passes if the score
reaches 1 / alpha, and the bound is the limit that the score would just reject. A score with the opposite sign fails the mean.
The scores of a few stakes are averaged, so that the result does not depend on the order of the documents. Source: Waudby-Smith
and Ramdas, JRSS B 86 (2024) 1-27.

A document outside a stake's range ends the stake: the stake's score is 0 from then on. If the range is known (distances
and shares are at least 0 and capped above), the level is exact. If the range is assumed (the loss or gain of one document in
recovery, answers and accepted drafts), the level is an estimate; `python -m benchmarks.gates` simulates the true level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Decisions = npt.NDArray[np.bool_]

OUTLIER = 3.0
"""Cap on a document's value in a test for PASS, as a multiple of the limit. Without a cap, a mean of heavy-tailed values has
no bound. A request with a KL above the cap counts as ruined. With a cap of 4, FP8's top-10 overlap would need more than 15
documents."""
PASS_STAKES = (0.9, 0.4)
"""Stakes on a mean below the limit, as shares of the maximum that the range allows. Sound engines are far below the limit."""
UNCAPPED_STAKES = (1.0, 0.15)
"""Stakes on a mean below the limit without a cap. The first suits few documents; one document outside its range ends it."""
FAIL_STAKES = (0.1, 0.2, 0.4, 0.9)
"""Stakes on a mean above the limit. Small stakes suit a mean that comes almost entirely from a few documents."""
MIN_T_DOCUMENTS = 36
"""Minimum documents for Student's t: a smaller sample may miss the rare values that make the distribution skewed."""
POWER = 0.9
"""Probability that the number of documents from `Mean.needed_documents` suffices for a decision."""
BISECTIONS = 14


def document_sums(documents: Sequence[str], *columns: npt.ArrayLike) -> list[Array]:
    """Return, for each column of values per sample, the sums by document, shape (documents,)."""
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    return [np.asarray(np.bincount(index, weights=np.asarray(column)), np.float64) for column in columns]


def document_totals(values: Sequence[float | None], documents: Sequence[str]) -> Array:
    """Return each document's sum divided by the mean number of samples per document, shape (documents,).

    The mean of the result is the mean over all samples. Documents with a missing value are NaN.
    """
    (totals,) = document_sums(documents, np.asarray(values, np.float64))
    return np.asarray(totals * len(totals) / len(values))


def log_score(gains: Array, stakes: Sequence[float]) -> Array:
    """Return the log of the score, the mean over `stakes`: (..., documents) -> (...).

    `gains`: at a stake of 1, each document multiplies the score by 1 plus its gain.
    """
    logs = [_steps(gains, stake).sum(axis=-1) for stake in stakes]
    return np.asarray(np.logaddexp.reduce(logs) - math.log(len(stakes)))


def _steps(gains: Array, stake: float) -> Array:
    with np.errstate(divide="ignore"):  # the log of an ended stake's score is -inf
        return np.asarray(np.log1p(np.maximum(stake * gains, -1.0)))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The decision of a test, with the one-sided bound behind it."""

    decision: Literal["PASS", "FAIL"] | None
    """None if the mean is neither clearly within the limit nor clearly outside."""
    value: float
    bound: float
    level: float
    """Error level of the decision: the FAIL level if the decision is FAIL, otherwise the PASS level."""


@dataclass(frozen=True)
class Mean:
    """A mean over documents, to be tested against a positive limit; larger is worse.

    `passes` and `fails` also decide many simulated runs at once: values of shape (runs, documents) give decisions (runs).
    """

    values: Array
    """One value per document, (documents)."""
    limit: float
    _: KW_ONLY
    best: float = 0.0
    """Lowest value that the stakes on a FAIL allow for."""
    worst: float | None = None
    """Highest value that the stakes on a PASS allow for; None means OUTLIER times the limit."""
    uncapped: bool = False
    """Whether documents above `worst` count in full in a test for PASS; otherwise they count as `worst`."""

    @property
    def cap(self) -> float:
        return OUTLIER * self.limit if self.worst is None else self.worst

    @property
    def stakes(self) -> tuple[float, ...]:
        return UNCAPPED_STAKES if self.uncapped else PASS_STAKES

    def pass_gains(self, limit: float) -> Array:
        """Return the gains of a bet that the mean is below `limit`, by document. Values count as at least `-self.limit`."""
        capped = np.maximum(self.values if self.uncapped else np.minimum(self.values, self.cap), -self.limit)
        return np.asarray((limit - capped) / (self.cap - self.limit))

    def fail_gains(self, limit: float) -> Array:
        return np.asarray((self.values - limit) / (self.limit - self.best))

    def fails(self, level: float) -> Decisions:
        """Return whether the mean without a cap is clearly above the limit, or not finite."""
        broken = ~np.isfinite(self.values).all(axis=-1)
        return np.asarray(broken | (log_score(self.fail_gains(self.limit), FAIL_STAKES) >= -math.log(level)))

    def passes(self, level: float, t_level: float = 0.0) -> Decisions:
        """Return whether the mean is clearly below the limit, by the bet or by Student's t."""
        by_bet = log_score(self.pass_gains(self.limit), self.stakes) >= -math.log(level)
        return np.asarray(by_bet | (self._student_bound(t_level) <= self.limit))

    def _student_bound(self, level: float) -> Array:
        """Return the upper bound of the mean by Student's t; infinite at level 0 or below MIN_T_DOCUMENTS."""
        applies = level > 0 and self.values.shape[-1] >= MIN_T_DOCUMENTS
        return skewed_upper_bound(self.values, level) if applies else np.full(self.values.shape[:-1], math.inf)

    def test(self, fail_level: float, pass_level: float, t_level: float = 0.0) -> Result:
        """Decide FAIL if the mean is clearly above the limit or not finite, PASS if it is clearly below (`passes`)."""
        with np.errstate(over="ignore", invalid="ignore"):  # the sum of finite values may overflow
            mean = float(self.values.mean()) if self.values.size else math.nan
        if not math.isfinite(mean):
            return Result(decision="FAIL", value=math.nan, bound=math.nan, level=fail_level)
        if self.fails(fail_level):
            target = -math.log(fail_level)
            failing_limit = _crossing(mean, -1.0, lambda limit: bool(log_score(self.fail_gains(limit), FAIL_STAKES) >= target))
            return Result(decision="FAIL", value=mean, bound=max(failing_limit, self.limit), level=fail_level)
        target = -math.log(pass_level)
        value = mean if self.uncapped else float(np.minimum(self.values, self.cap).mean())
        bound = _crossing(value, 1.0, lambda limit: bool(log_score(self.pass_gains(limit), self.stakes) >= target))
        by_bet = bool(self.passes(pass_level))
        by_student = math.inf if by_bet else float(self._student_bound(t_level))
        bound = min(bound if self.uncapped else min(bound, self.cap), by_student)
        level = pass_level + t_level
        if by_bet or by_student <= self.limit:
            return Result(decision="PASS", value=value, bound=min(bound, self.limit), level=level)
        return Result(decision=None, value=value, bound=bound, level=level)

    def needed_documents(self, level: float, max_documents: int, t_level: float = 0.0) -> int:
        """Estimate how many documents like these decide with a probability of POWER, at most `max_documents`."""
        sides = ((self.pass_gains(self.limit), self.stakes), (self.fail_gains(self.limit), FAIL_STAKES))
        counts = [
            _documents_to_reach(_steps(gains, stake), math.log(len(stakes) / level))
            for gains, stakes in sides
            for stake in stakes
        ]
        gap = self.limit - float(self.values.mean())
        if t_level and gap > 0:
            quantiles = NormalDist().inv_cdf(1 - t_level) + NormalDist().inv_cdf(POWER)
            counts.append(
                max(MIN_T_DOCUMENTS, math.ceil(min(max_documents, (quantiles * float(self.values.std()) / gap) ** 2)))
            )
        return int(min(max_documents, *counts))


def skewed_upper_bound(values: Array, alpha: float) -> Array:
    """Return the one-sided 1 - alpha upper bound of a mean by Student's t, transformed for skewed values: (..., n) -> (...).

    It needs many values. Without the transformation, t errs more often than alpha if a few values have most of the loss.
    Source: Hall, JRSS B 54 (1992) 221.
    """
    from scipy.special import stdtrit

    n = values.shape[-1]
    mean = values.mean(axis=-1)
    spread = values.std(axis=-1, ddof=1)
    scale = np.where(spread > 0, spread, 1.0)
    skew = (((values - mean[..., None]) / scale[..., None]) ** 3).mean(axis=-1)
    score = stdtrit(n - 1, alpha) / math.sqrt(n) - skew / (6 * n)
    # Hall's cubic transformation of the score, solved for the limit. Without skew it is the score itself.
    slope = np.where(np.abs(skew) < 1e-6, 1.0, skew)
    solved = np.where(np.abs(skew) < 1e-6, score, 3 / slope * (np.cbrt(1 + slope * score) - 1))
    return np.asarray(mean - spread * solved)


def _documents_to_reach(steps: Array, target: float) -> float:
    """Estimate how many steps like these reach a sum of `target` with a probability of POWER; infinite if they do not grow."""
    growth = float(steps.mean())
    if not growth > 0:
        return math.inf
    spread = NormalDist().inv_cdf(POWER) * float(steps.std())
    return math.ceil(((spread + math.sqrt(spread * spread + 4 * growth * target)) / (2 * growth)) ** 2)


def _crossing(mean: float, direction: float, rejected: Callable[[float], bool]) -> float:
    """Return the rejected limit that is nearest to `mean`, above it for `direction` 1 and below it for -1, by bisection.

    `mean` must be finite, and if a limit is rejected, all limits farther from `mean` must be rejected too. The result is
    infinite if no limit is rejected.
    """
    step = max(abs(mean), 1e-6)
    while not rejected(mean + direction * step):
        step *= 2
        if not math.isfinite(mean + direction * step):
            return direction * math.inf
    inside, outside = mean, mean + direction * step
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
    return outside
