"""Tests of a figure against a limit above which it is too bad: of a mean by betting, of a share of events, and of a slope."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from pipeline.statistics import bounds
from pipeline.statistics.bounds import Array

OUTLIER = 3.0
"""A document counts at most as this many times the limit where a mean has to pass, and a request whose KL is beyond that is
ruined, whatever its KL: how many are has a gate of its own. No mean of so heavy tails can be bounded otherwise. With 4, 15
documents would not show that a top-10 overlap as good as that of FP8 is within its limit."""

MANY = 36
"""Documents from which on Student's t of skewed values is trusted: fewer may not show what makes them skewed."""


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
    values: Array
    limit: float
    best: float = 0.0
    """Values below count as this."""
    whole: bool = False
    """Whether outliers count whole where the mean has to pass. Those that were not seen are no worse than these, or than
    OUTLIER times the limit."""

    @property
    def worst(self) -> float:
        """What a document counts at most where the mean has to pass."""
        most = OUTLIER * self.limit
        return max(most, float(self.values.max())) if self.whole else most

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares that are bet on a PASS."""
        return bounds.SHARES_OF_WHOLE if self.whole else bounds.SHARES_FOR_PASS

    def fails(self, level: float) -> bool:
        """Return whether the mean, with outliers whole, is clearly above the limit or not finite."""
        if not np.isfinite(self.values).all():
            return True
        raw = np.maximum(self.values, self.best)
        return bounds.log_wealth_above(raw, self.limit, self.best) >= -math.log(level)

    def test(self, fail_level: float, pass_level: float, t_level: float = 0.0) -> Result:
        """Return FAIL where the mean is clearly above the limit, PASS where it is clearly below with outliers cut.

        With a `t_level`, MANY documents also PASS where Student's t shows at that level what the bet leaves open.
        """
        if not np.isfinite(self.values).all():
            return Result("FAIL", math.nan, math.nan, fail_level)
        if self.fails(fail_level):
            raw = np.maximum(self.values, self.best)
            return Result("FAIL", float(raw.mean()), bounds.lower_bound(raw, fail_level, self.best), fail_level)
        cut = np.clip(self.values, self.best, self.worst)
        passes = bounds.log_wealth_below(cut, self.limit, self.worst, self.shares) >= -math.log(pass_level)
        bound = bounds.upper_bound(cut, pass_level, self.worst, self.shares)
        if t_level and not passes and len(cut) >= MANY:
            by_t = float(bounds.skewed_upper_bound(self.values, t_level))
            passes, bound = by_t <= self.limit, min(bound, by_t)
        return Result("PASS" if passes else None, float(cut.mean()), bound, pass_level + t_level)

    def needed(self, level: float, power: float, most: int, t_level: float = 0.0) -> int:
        """Return about how many documents like these decide with `power`, `most` where more would not either."""
        cut = np.clip(self.values, self.best, self.worst)
        below = bounds.gains(self.limit - cut, self.worst - self.limit)
        above = bounds.gains(np.maximum(self.values, self.best) - self.limit, self.limit - self.best)
        counts = [
            bounds.documents_to_reach(bounds.log_steps(won, share), -math.log(level) + math.log(len(shares)), power)
            for won, shares in ((below, self.shares), (above, bounds.SHARES_FOR_FAIL))
            for share in shares
        ]
        if t_level:
            counts.append(max(MANY, math.ceil(min(most, bounds.documents_for_t(self.values, self.limit, t_level, power)))))
        return int(min(most, *counts))


def can_pass(documents: int, level: float) -> bool:
    """Return whether so many documents are enough for a mean that is 0."""
    return bounds.log_wealth_below(np.zeros(documents), 1.0, OUTLIER) >= -math.log(level)


def share(
    events: Sequence[float],
    sizes: Sequence[float],
    documents: Sequence[str],
    limit: float,
    levels: tuple[float, float],
    correlation: float,
) -> Result:
    """Test the share of events by exact bounds of counts.

    `levels` are those of a FAIL and of a PASS; `correlation` is how alike the events of a document are taken to be, as far as
    the counts do not show it.
    """
    counted, measured = bounds.document_sums(documents, events, sizes)
    count, n = float(counted.sum()), float(measured.sum())
    effect = bounds.design_effect(counted, counted, measured, correlation)
    lowest = bounds.share_bound(count / effect, n / effect, levels[0], lower=True)
    highest = bounds.share_bound(count / effect, n / effect, levels[1], lower=False)
    if lowest > limit:
        return Result("FAIL", count / n, lowest, levels[0])
    return Result("PASS" if highest <= limit else None, count / n, highest, levels[1])


def slope(
    x: Sequence[float], y: Sequence[float], documents: Sequence[str], limit: float, levels: tuple[float, float]
) -> Result:
    """Test the least-squares slope of y on x, which is not constant, by Student's t of the documents. Arguments: `share`."""
    value, error = bounds.clustered_slope(np.asarray(x), np.asarray(y), documents)
    freedom = len(set(documents)) - 2
    low, high = value + float(stdtrit(freedom, levels[0])) * error, value - float(stdtrit(freedom, levels[1])) * error
    if low > limit:
        return Result("FAIL", value, low, levels[0])
    return Result("PASS" if high <= limit else None, value, high, levels[1])
