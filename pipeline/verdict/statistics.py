"""Paired statistics of the gates. They are deterministic: every bootstrap has a fixed seed.

Legend: of n samples the candidate `lost` some (baseline right, candidate wrong) and `gained` some (the reverse);
difference = (gained - lost) / n, the candidate's accuracy minus the baseline's.

**The test of a difference** is the exact unconditional one for paired proportions, ordered by Tango's score statistic:
its p-value is the largest probability, over the nuisance parameter, of data at least as extreme (Tango, Statistics in
Medicine 17 (1998) 891-908; Hsueh, Liu and Chen, Biometrics 57 (2001) 478-483, who show that the boundary of the null
hypothesis suffices). McNemar's test does not fit, because its null hypothesis is "no difference". A paired bootstrap
degenerates when nothing flipped, and Tango's asymptotic bound alone passes zero flips too early (it asks for 52 samples at a
margin of 5 points where the exact bound 0.95^n <= 0.05 asks for 59). Above EXACT_LIMIT samples the asymptotic score test is
used.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, gammaln, ndtr, ndtri

from pipeline.verdict.bounds import EVENT_CORRELATION, Array, design_effect

EXACT_LIMIT = 400
"""Samples up to which the exact test is used."""
NUISANCE_POINTS = 80
"""Grid points of the nuisance parameter in the exact test."""
REPLICATES = 2000
"""Replicates that every bootstrap draws."""
SEED = 20_260_101


@dataclass(frozen=True)
class Pairs:
    """Counts of a paired comparison; `effective` ones are smaller when samples share documents."""

    n: int
    lost: int
    gained: int

    @property
    def difference(self) -> float:
        """The candidate's accuracy minus the baseline's."""
        return (self.gained - self.lost) / self.n


def effective_pairs(differences: Sequence[int], documents: Sequence[str]) -> Pairs:
    """Return the counts that independent samples with the same information would have.

    Args:
        differences: Per sample -1 (lost), 0 or 1 (gained).
        documents: Per sample its document; samples of one document depend on each other.
    """
    d = np.asarray(differences, dtype=np.float64)
    n, lost, gained = len(d), int((d < 0).sum()), int((d > 0).sum())
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    sums, squares, sizes = (np.bincount(index, weights=w).astype(np.float64) for w in (d, d * d, np.ones(n)))
    effect = design_effect(sums, squares, sizes, EVENT_CORRELATION)
    if effect == 1:
        return Pairs(n, lost, gained)
    # rounded against the candidate
    return Pairs(max(1, int(n / effect)), math.ceil(lost / effect), int(gained / effect))


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
def _score_grid(n: int, difference: float) -> Array:
    """z of every outcome, shape (n + 1, n + 1): row k is the number of flips, column c the losses of them; NaN where c > k."""
    flips = np.arange(n + 1, dtype=np.float64)[:, None]
    lost = np.arange(n + 1, dtype=np.float64)[None, :]
    z = score_z(np.broadcast_to(lost, (n + 1, n + 1)), flips - lost, n, difference)
    return np.where(lost <= flips, z, np.nan)


@lru_cache(maxsize=4096)
def _exact_p(pairs: Pairs, difference: float, better: bool) -> float:
    n = pairs.n
    grid = _score_grid(n, difference)
    observed = grid[pairs.lost + pairs.gained, pairs.lost]
    tolerance = 1e-9 * max(1.0, abs(observed)) if math.isfinite(observed) else 0.0
    flips = np.arange(n + 1)
    # the common part of both flip rates; the grid is denser near 0, where the supremum usually is
    shared = np.linspace(0.0, 1.0, NUISANCE_POINTS) ** 2 * (1 - abs(difference)) / 2
    p_lost = shared + max(-difference, 0.0)
    rate = np.minimum(2 * shared + abs(difference), 1.0)[:, None]
    share = np.divide(p_lost[:, None], rate, out=np.full_like(rate, 0.5), where=rate > 0)
    log_choose = gammaln(n + 1) - gammaln(flips + 1) - gammaln(n - flips + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_pmf = log_choose + np.where(flips > 0, flips * np.log(rate), 0.0)
        log_pmf = log_pmf + np.where(n - flips > 0, (n - flips) * np.log1p(-rate), 0.0)
    pmf = np.exp(log_pmf)
    with np.errstate(invalid="ignore"):
        # z falls as losses rise: the outcomes at least as good have at most `most` losses, those at least as bad have more
        inside = (grid >= observed - tolerance) if better else (grid > observed + tolerance)
    most = inside.sum(axis=1) - 1
    at_most = np.where(most >= 0, bdtr(np.maximum(most, 0), flips, np.broadcast_to(share, pmf.shape)), 0.0)
    tail = at_most if better else 1.0 - at_most
    return float(min(1.0, (pmf * tail).sum(axis=1).max()))


def _p(pairs: Pairs, difference: float, better: bool) -> float:
    if pairs.n <= EXACT_LIMIT:
        return _exact_p(pairs, difference, better)
    z = float(score_z(np.array([pairs.lost], float), np.array([pairs.gained], float), pairs.n, difference)[0])
    return float(ndtr(-z if better else z))


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

    Args:
        p_values: Of each hypothesis.
        alpha: What all hypotheses together may err with.
        nominal: From what a hypothesis may err with over all looks to the level at this look.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels = [0.0] * len(p_values)
    for rank, i in enumerate(order):
        levels[i] = nominal(alpha / (len(order) - rank))
        if p_values[i] > levels[i]:
            break
    return levels


def paired_samples(lost: float, gained: float, margin: float, alpha: float, power: float) -> float:
    """Return about the samples with which one look decides with `power`: ((z_alpha s0 + z_power s1) / (margin + difference))^2.

    s1 is the standard deviation of one sample's difference, s0 the one that the score statistic takes for it at the margin
    (Nam, Biometrics 53 (1997) 1422-1430). s1 for both asks for too few where few answers flip: for 334 at a loss of 2.5 %, a
    margin of 0.05, alpha 0.05 and power 0.9, where the power is 0.67; s0 and s1 ask for 500.

    Args:
        lost: True share of the answers that the candidate loses.
        gained: True share that it gains; gained - lost must not be -margin.
        margin: The margin, above 0.
        alpha: The test's level.
        power: The wanted power.
    """
    difference = gained - lost
    at_margin = math.sqrt(float(null_variance(np.array(lost), np.array(gained), 1, -margin)))
    true = math.sqrt(lost + gained - difference * difference)
    z = float(ndtri(1 - alpha)) * at_margin + float(ndtri(power)) * true
    return (z / (margin + difference)) ** 2


@lru_cache(maxsize=256)
def rejected_up_to(n: int, margin: float, level: float, most_gained: int, for_pass: bool) -> tuple[int, ...]:
    """Return where a test decides, for each count of gained answers from 0 to `most_gained`.

    Args:
        n: Samples.
        margin: The margin.
        level: The level of the test.
        most_gained: The largest count of gained answers.
        for_pass: Which test: that for a PASS, or that for a FAIL.

    Returns:
        For a PASS the most lost answers that pass, -1 where none do; for a FAIL the most that do not fail.
    """
    most, counts = -1, []
    for gained in range(most_gained + 1):
        most = max(most - 1, -1)  # rounding apart it never falls
        while most + 1 + gained <= n:
            pairs = Pairs(n, most + 1, gained)
            p = noninferiority_p(pairs, margin) if for_pass else inferiority_p(pairs, margin)
            if (p <= level) != for_pass:
                break
            most += 1
        counts.append(most)
    return tuple(counts)


def decision_power(n: int, lost: float, gained: float, margin: float, level: float, for_pass: bool) -> float:
    """Return the probability that the test decides a candidate that loses and gains these shares, with n samples at `level`."""
    likely = int(n * gained + 6 * math.sqrt(n * gained * (1 - gained)) + 3)
    most_gained = min(n, 16 * math.ceil(likely / 16))  # few different counts: what the test decides is kept
    bounds = np.array(rejected_up_to(n, margin, level, most_gained, for_pass))
    counts = np.arange(most_gained + 1)
    chances = np.diff(np.concatenate([[0.0], bdtr(counts, n, gained)]))
    share = min(lost / (1 - gained), 1.0) if gained < 1 else 0.0
    below = np.where(bounds >= 0, bdtr(np.maximum(bounds, 0), n - counts, share), 0.0)
    return float((chances * (below if for_pass else 1 - below)).sum())


def samples_to_decide(lost: float, gained: float, margin: float, level: float, power: float, most: int) -> int:
    """Return about the fewest samples with which the test that decides does so with `power`, but `most` at most.

    It is the exact power of the exact test; whole numbers of flips make it rise and fall by a few points from one n to the
    next, so that a few samples fewer may do too.

    Args:
        lost: True share of the answers that the candidate loses.
        gained: True share that it gains.
        margin: The margin; a loss below it is to pass, one above it to fail.
        level: The level of the test.
        power: The wanted power.
        most: The number where the search ends.
    """
    for_pass = lost - gained < margin
    enough = paired_samples(lost, gained, margin, level, power)
    if enough > 4 * EXACT_LIMIT:  # there the test is that of the formula, which whole numbers of flips no longer move
        return min(most, math.ceil(1.05 * enough))
    n = max(8, int(0.8 * enough))
    while n < most and decision_power(n, lost, gained, margin, level, for_pass) < power:
        n += max(1, n // 25)
    return min(n, most)


def resampled_sums(sums: Array, documents: Sequence[str], seed: int = SEED) -> Array:
    """Resample `sums`, shape (rows, columns), by document and return the column sums, shape (REPLICATES, columns)."""
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    weights = _draws(int(index.max()) + 1, seed)
    clustered = np.zeros((weights.shape[1], sums.shape[1]))
    np.add.at(clustered, index, sums)
    return weights @ clustered


@lru_cache(maxsize=16)
def _draws(count: int, seed: int) -> Array:
    drawn = np.random.default_rng(seed).integers(count, size=(REPLICATES, count))
    drawn += np.arange(REPLICATES)[:, None] * count
    return np.bincount(drawn.ravel(), minlength=REPLICATES * count).reshape(REPLICATES, count).astype(np.float64)


def pooled_slope(x: Array, y: Array, weight: Array, group: Sequence[str], documents: Sequence[str]) -> tuple[float, Array]:
    """Return the weighted least-squares slope of y on x within groups, and its bootstrap by document.

    Each group has a level of its own. A slope is NaN where no group has two different x.
    """
    names = np.asarray(group)
    moments = np.stack([weight, weight * x, weight * y, weight * x * x, weight * x * y], axis=1)
    columns = [moments * (names == name)[:, None] for name in np.unique(names)]
    stacked = np.concatenate(columns, axis=1)

    def slope(sums: Array) -> Array:
        parts = sums.reshape(sums.shape[0], -1, 5)
        w, wx, wy, wxx, wxy = np.moveaxis(parts, 2, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            sxx, sxy = (np.where(w > 0, a - wx * b / w, 0.0) for a, b in ((wxx, wx), (wxy, wy)))
            spread = sxx.sum(axis=1)
            ratio = sxy.sum(axis=1) / spread
        scale = wxx.sum(axis=1)
        return np.asarray(np.where(spread > 1e-9 * scale, ratio, np.nan))

    return float(slope(stacked.sum(axis=0, keepdims=True))[0]), slope(resampled_sums(stacked, documents))
