"""Group-sequential looks: how the gates may look at growing samples several times and keep their error rates.

An evaluation runs its samples in rounds, and the gates look after each. Testing at `alpha` every time would be wrong far more
often than `alpha`. Each look has a nominal level of its own instead, so that the chance of a wrong decision at any look
together is `alpha`: **alpha spending** (Lan and DeMets, Biometrika 70 (1983) 659-663). The information fraction of a look is
its cumulative share of the planned samples. The levels follow from the joint normal distribution of the looks by recursive
integration (Armitage, McPherson and Rowe, JRSS A 132 (1969) 235-244).

- PASS spends `2 - 2 Phi(z_{alpha/2} / sqrt(share))`, Lan and DeMets' O'Brien-Fleming-type function: next to nothing early,
  where an exact test of few samples cannot show a margin anyway, so that nearly all of `alpha` is left for the last look.
- FAIL spends `alpha sqrt(share)`, the power family of Kim and DeMets (Biometrika 74 (1987) 149-154) with exponent 1/2: a third
  of it after a tenth of the samples, so that a broken engine is refused there.

With one look every level is `alpha` itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri

from pipeline.statistics.bounds import Array

NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)
"""Gauss-Legendre quadrature of the recursive integration; a thousand nodes change no level by 1e-12."""
FARTHEST = 9.0
"""Standard deviations below which no path of the score is followed."""
HALVINGS = 50
"""Of the range that a boundary lies in: SciPy's own search takes half a second to import."""

Spending = Callable[[float, float], float]
"""(share of the planned samples, alpha) -> the error that may have been spent by then."""


def obrien_fleming_spending(share: float, alpha: float) -> float:
    """Return 2 - 2 Phi(z_{alpha/2} / sqrt(share)), Lan and DeMets' O'Brien-Fleming-type function."""
    return float(2 * ndtr(ndtri(alpha / 2) / math.sqrt(share)))


def square_root_spending(share: float, alpha: float) -> float:
    """Return alpha sqrt(share), Kim and DeMets' power family with exponent 1/2."""
    return alpha * math.sqrt(share)


@dataclass(frozen=True)
class Look:
    """One look of the gates at all samples up to a round."""

    number: int
    last_round: int
    """The round up to which the samples are looked at, from 1."""
    shares: tuple[float, ...]
    """The cumulative share of the planned samples at every planned look; the last is 1."""

    @property
    def place(self) -> str:
        """Where in the plan this look is, for the end of a reason; empty for the only look of a plan."""
        return f"; round {self.number} of {len(self.shares)}" if len(self.shares) > 1 else ""

    def pass_level(self, alpha: float) -> float:
        """Return the nominal level of a test for PASS at this look, when all looks together may err with `alpha`."""
        return nominal_levels(self.shares, alpha, obrien_fleming_spending)[self.number - 1]

    def fail_level(self, alpha: float) -> float:
        """Return the nominal level of a test for FAIL at this look, when all looks together may err with `alpha`."""
        return nominal_levels(self.shares, alpha, square_root_spending)[self.number - 1]


def planned_looks(planned_rounds: Sequence[float], most: int) -> list[Look]:
    """Return the looks of a plan of rounds, at most `most`.

    A plan with more rounds keeps its first ones as looks; the last look is at all samples. Information fractions stay shares of
    all planned samples: what the looks left out would have spent, the later ones do. The cumulative shares of `planned_rounds`
    end at 1.
    """
    rounds = [*range(1, min(most, len(planned_rounds))), len(planned_rounds)]
    shares = tuple(planned_rounds[last - 1] for last in rounds)
    return [Look(number, last, shares) for number, last in enumerate(rounds, 1)]


@dataclass(frozen=True)
class _Paths:
    """The paths of the score that have crossed no boundary so far: a Brownian motion, of variance t at a share t."""

    share: float
    scores: Array
    """Quadrature nodes, shape (nodes,)."""
    masses: Array
    """Probability that each node stands for, shape (nodes,)."""

    def crossing(self, share: float, boundary: float) -> float:
        """Return the probability to be above `boundary` at the next look, and not before."""
        step = share - self.share
        return float(self.masses @ ndtr((self.scores - boundary) / math.sqrt(step)))

    def below(self, share: float, boundary: float) -> "_Paths":
        """Return the paths that are below `boundary` at the next look too."""
        step = share - self.share
        low = min(-FARTHEST * math.sqrt(share), boundary)
        scores = low + (boundary - low) * (NODES + 1) / 2
        distance = (scores[:, None] - self.scores) / math.sqrt(step)
        density = np.exp(-(distance**2) / 2) @ self.masses / math.sqrt(2 * math.pi * step)
        return _Paths(share, scores, density * WEIGHTS * (boundary - low) / 2)


_START = _Paths(0.0, np.zeros(1), np.ones(1))


@lru_cache(maxsize=1024)
def nominal_levels(shares: tuple[float, ...], alpha: float, spending: Spending) -> tuple[float, ...]:
    """Return the level of the test at each look with which the looks up to it err with `spending(share, alpha)` together."""
    levels: list[float] = []
    paths, spent = _START, 0.0
    for share in shares:
        spent_before, spent = spent, alpha if share == 1 else spending(share, alpha)
        # The first look's level is what it spends, to the last bit: with one look the test is the one at alpha.
        level = float(ndtr(-_boundary(paths, share, spent - spent_before) / math.sqrt(share))) if levels else spent
        levels.append(level)
        paths = paths.below(share, _boundary_of(level, share))
    return tuple(levels)


def _boundary(paths: _Paths, share: float, wanted: float) -> float:
    """Return the boundary that the paths cross at a look with the probability `wanted`."""
    low, high = -FARTHEST * math.sqrt(share), FARTHEST * math.sqrt(share)
    if wanted <= paths.crossing(share, high):
        return math.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if paths.crossing(share, middle) > wanted else (low, middle)
    return high


def _boundary_of(level: float, share: float) -> float:
    """Return the score above which a test at `level` rejects; one too small to matter has a boundary that no path reaches."""
    return float(min(-ndtri(level), FARTHEST) * math.sqrt(share))
