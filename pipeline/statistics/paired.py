"""The gates' test of paired answers, and what samples that share documents count as.

Legend: of n samples the candidate `lost` some (baseline right, candidate wrong) and `gained` some (the reverse);
difference = (gained - lost) / n, the candidate's accuracy minus the baseline's.

**The test of a difference** is the exact unconditional one for paired proportions, ordered by Tango's score statistic:
its p-value is the largest probability, over the nuisance parameter, of data at least as extreme (Tango, Statistics in
Medicine 17 (1998) 891-908; Hsueh, Liu and Chen, Biometrics 57 (2001) 478-483, who show that the boundary of the null
hypothesis suffices). McNemar's test does not fit, because its null hypothesis is "no difference". A paired bootstrap
degenerates when nothing flipped, and Tango's asymptotic bound alone passes zero flips too early (it asks for 52 samples at a
margin of 5 points where the exact bound 0.95^n <= 0.05 asks for 59). Above EXACT_LIMIT samples the asymptotic score test is
used. Counts that were divided by a design effect are not whole: between whole ones the p-value is interpolated on a log scale.
`python -m benchmarks.gate_clusters` shows up to which correlation within documents that holds its level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, gammaln, ndtr, xlog1py, xlogy

from pipeline.statistics.bounds import EVENT_CORRELATION, Array, design_effect, document_sums

EXACT_LIMIT = 400
"""Samples up to which the exact test is used."""
NUISANCE_POINTS = 80
"""Grid points of the nuisance parameter in the exact test."""
LEAST_CHANCE = 1e-30
"""Numbers of flips that are less probable add nothing to a p-value."""


@dataclass(frozen=True)
class Pairs:
    """Counts of a paired comparison; where samples share documents they are smaller than those seen, and not whole."""

    n: int
    lost: float
    gained: float

    @property
    def difference(self) -> float:
        """The candidate's accuracy minus the baseline's."""
        return (self.gained - self.lost) / self.n


def effective_pairs(differences: Sequence[int], documents: Sequence[str]) -> Pairs:
    """Return the counts that independent samples with the same information would have.

    A difference is -1 (lost), 0 or 1 (gained).
    """
    d = np.asarray(differences)
    return document_pairs(*document_sums(documents, d < 0, d > 0, np.ones(len(d))))


def document_pairs(lost: Array, gained: Array, sizes: Array) -> Pairs:
    """Return what `effective_pairs` does, of each document's lost answers, gained answers and samples, shape (documents,)."""
    n, all_lost, all_gained = (int(counts.sum()) for counts in (sizes, lost, gained))
    effect = design_effect(gained - lost, gained + lost, sizes, EVENT_CORRELATION)
    if effect == 1:
        return Pairs(n, all_lost, all_gained)
    worth = max(1, int(n / effect))
    return Pairs(worth, all_lost * worth / n, all_gained * worth / n)


def binomial(counts: npt.NDArray[np.int64], n: int, rate: Array | float) -> Array:
    """Return the probability of each count of events among n, each of which has the probability `rate`."""
    ways = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1)
    return np.asarray(np.exp(ways + xlogy(counts, rate) + xlog1py(n - counts, -rate)))


def score_z(lost: Array, gained: Array, n: int, difference: float) -> Array:
    """Return Tango's score statistic for H0: true difference = `difference`. It is large when the candidate is better."""
    variance = null_variance(lost, gained, n, difference)
    gap = gained - lost - n * difference
    certain = np.where(gap == 0, 0.0, np.copysign(np.inf, gap))  # without variance the data contradict H0 or agree with it
    return np.where(variance > 1e-300, gap / np.sqrt(np.maximum(variance, 1e-300)), certain)


def null_variance(lost: Array, gained: Array, n: int, difference: float) -> Array:
    """Return the variance of gained - lost by the rates that are most likely where the true difference is `difference`."""
    b, c = gained, lost
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    root = np.sqrt(np.maximum(linear * linear - 8 * n * constant, 0.0))
    p_lost = np.maximum((root - linear) / (4 * n), max(0.0, -difference))
    return np.asarray(n * np.maximum(2 * p_lost + difference * (1 - difference), 0.0))


@lru_cache(maxsize=64)
def score_grid(n: int, difference: float) -> Array:
    """z of every outcome, shape (n + 1, n + 1): row k is the number of flips, column c the losses of them; NaN where c > k."""
    flips = np.arange(n + 1, dtype=np.float64)[:, None]
    lost = np.arange(n + 1, dtype=np.float64)[None, :]
    z = score_z(np.broadcast_to(lost, (n + 1, n + 1)), flips - lost, n, difference)
    return np.where(lost <= flips, z, np.nan)


@dataclass(frozen=True)
class _Flips:
    """How many flips there may be at a point of the nuisance parameter on a null hypothesis's boundary, and how they fall."""

    counts: npt.NDArray[np.int64]
    """Numbers of flips whose chance is above LEAST_CHANCE, shape (counts,)."""
    chances: Array
    share: float


@lru_cache(maxsize=64)
def _nuisance(n: int, difference: float) -> tuple[_Flips, ...]:
    """Return the grid of the nuisance parameter, the part that both flip rates share: denser near 0, where the worst one is."""
    shared = np.linspace(0.0, 1.0, NUISANCE_POINTS) ** 2 * (1 - abs(difference)) / 2
    rates = np.minimum(2 * shared + abs(difference), 1.0)
    shares = np.divide(shared + max(-difference, 0.0), rates, out=np.full_like(rates, 0.5), where=rates > 0)
    points = []
    for chances, share in zip(binomial(np.arange(n + 1)[None, :], n, rates[:, None]), shares, strict=True):
        counts = np.flatnonzero(chances > LEAST_CHANCE)
        points.append(_Flips(counts, chances[counts], float(share)))
    return tuple(points)


def tail_chances(z: float, n: int, difference: float, better: bool, points: Sequence[int]) -> Array:
    """Return the probability of outcomes at least as extreme as the score `z`, at these points of the nuisance parameter."""
    tolerance = 1e-9 * max(1.0, abs(z)) if math.isfinite(z) else 0.0
    grid, nuisance = score_grid(n, difference), _nuisance(n, difference)
    with np.errstate(invalid="ignore"):
        # z falls as losses rise: the outcomes at least as good have at most `most` losses, those at least as bad have more
        inside = (grid >= z - tolerance) if better else (grid > z + tolerance)
    most = inside.sum(axis=1) - 1
    tails = []
    for flips in (nuisance[point] for point in points):
        at_most = np.where(most[flips.counts] >= 0, bdtr(np.maximum(most[flips.counts], 0), flips.counts, flips.share), 0.0)
        tails.append(float(flips.chances @ (at_most if better else 1.0 - at_most)))
    return np.minimum(tails, 1.0)


@lru_cache(maxsize=65_536)
def _exact_p(n: int, lost: int, gained: int, difference: float, better: bool) -> float:
    observed = float(score_grid(n, difference)[lost + gained, lost])
    return float(tail_chances(observed, n, difference, better, range(NUISANCE_POINTS)).max())


def _p(pairs: Pairs, difference: float, better: bool) -> float:
    if pairs.n > EXACT_LIMIT:
        z = float(score_z(np.array([pairs.lost], float), np.array([pairs.gained], float), pairs.n, difference)[0])
        return float(ndtr(-z if better else z))
    corners = [
        (weight_lost * weight_gained, lost, min(gained, pairs.n - lost))
        for lost, weight_lost in _whole(pairs.lost)
        for gained, weight_gained in _whole(pairs.gained)
    ]
    if len(corners) == 1:
        return _exact_p(pairs.n, *corners[0][1:], difference, better)
    logs = [weight * math.log(max(_exact_p(pairs.n, *counts, difference, better), 1e-300)) for weight, *counts in corners]
    return math.exp(sum(logs))


def _whole(count: float) -> list[tuple[int, float]]:
    """Return the whole counts beside a count, with the weights of an interpolation between them."""
    below = math.floor(count + 1e-9)
    above = max(0.0, count - below)
    return [(below, 1 - above), (below + 1, above)] if above > 1e-9 else [(below, 1.0)]


def noninferiority_p(pairs: Pairs, margin: float) -> float:
    """Return the p-value against "the true difference is -margin or worse"; a small one means good enough."""
    return _p(pairs, -margin, better=True)


def inferiority_p(pairs: Pairs, margin: float) -> float:
    """Return the p-value against "the true difference is -margin or better"; a small one means clearly too bad."""
    return _p(pairs, -margin, better=False)


@lru_cache(maxsize=4096)
def difference_bound(pairs: Pairs, alpha: float, lower: bool) -> float:
    """Return the one-sided 1 - alpha bound of the difference, by inverting the tests above (to 1e-4)."""
    low, high = -1.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        rejected = _p(pairs, middle, better=lower) <= alpha
        # a rejected difference lies outside of the interval: below its lower bound, or above its upper one
        low, high = (middle, high) if rejected == lower else (low, middle)
    return low if lower else high


def holm_levels(p_values: Sequence[float], alpha: float, nominal: Callable[[float], float]) -> list[float]:
    """Return the level at which Holm's procedure tests each hypothesis; 0 where it stopped before.

    `nominal` turns what a hypothesis may err with over all looks into the level at this look.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels = [0.0] * len(p_values)
    for rank, i in enumerate(order):
        levels[i] = nominal(alpha / (len(order) - rank))
        if p_values[i] > levels[i]:
            break
    return levels
