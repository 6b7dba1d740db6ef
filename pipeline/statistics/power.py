"""What a number of samples can show: the power of the paired test, and the samples with which it decides.

The p-value of the exact test depends on an outcome through its score statistic alone. So one number, the critical score, says
of all outcomes of n samples which the test rejects, and the power is a sum of binomial probabilities: nothing is drawn.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, ndtri

from pipeline.statistics.bounds import Array
from pipeline.statistics.paired import EXACT_LIMIT, NUISANCE_POINTS, binomial, null_variance, score_grid, score_z, tail_chances


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


@lru_cache(maxsize=1024)
def critical_score(n: int, difference: float, level: float, better: bool) -> float:
    """Return the score statistic from which on the test rejects: its p-value depends on nothing else, and falls with it.

    Of the test for a PASS (`better`) it is the least that rejects, of that for a FAIL the largest; infinite where none does.
    """
    outward = 1.0 if better else -1.0
    if n > EXACT_LIMIT:
        return outward * float(-ndtri(level))
    grid = score_grid(n, difference)
    scores = np.unique(outward * grid[~np.isnan(grid)])
    low, points = -1, [0]  # scores[low] does not reject
    while True:
        high = len(scores)
        while high - low > 1:  # by few points, to which the worst of all is added where they reject too early
            middle = (low + high) // 2
            rejects = tail_chances(outward * float(scores[middle]), n, difference, better, points).max() <= level
            low, high = (low, middle) if rejects else (middle, high)
        if high == len(scores):
            return outward * math.inf
        z = outward * float(scores[high])
        tails = tail_chances(z, n, difference, better, range(NUISANCE_POINTS))
        if tails.max() <= level:
            return z
        low, points = high, [*points, int(tails.argmax())]


def rejected_up_to(n: int, margin: float, level: float, gained: Array, for_pass: bool) -> Array:
    """Return where a test decides, for each count of gained answers.

    Args:
        n: Samples.
        margin: The margin.
        level: The level of the test.
        gained: Counts of gained answers, shape (counts,).
        for_pass: Which test: that for a PASS, or that for a FAIL.

    Returns:
        For a PASS the most lost answers that pass, -1 where none do; for a FAIL the most that do not fail. Shape (counts,).
    """
    critical = critical_score(n, -margin, level, for_pass)
    if math.isinf(critical):
        return np.full(gained.shape, -1.0) if for_pass else n - gained
    edge = critical + (-1e-9 if for_pass else 1e-9) * max(1.0, abs(critical))  # equal scores differ by rounding
    low, high = np.full(gained.shape, -1.0), n - gained + 1  # `low` lost are on the good side of the edge, `high` are not
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        z = score_z(np.maximum(middle, 0.0), gained, n, -margin)
        good = (z >= edge) if for_pass else (z > edge)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


def decision_power(n: int, lost: float, gained: float, margin: float, level: float, for_pass: bool) -> float:
    """Return the probability that the test decides a candidate that loses and gains these shares, with n samples at `level`."""
    spread = 8 * math.sqrt(n * gained * (1 - gained)) + 8
    counts = np.arange(max(0, int(n * gained - spread)), min(n, int(n * gained + spread)) + 1)
    bounds = rejected_up_to(n, margin, level, counts.astype(np.float64), for_pass)
    share = min(lost / (1 - gained), 1.0) if gained < 1 else 0.0
    below = np.where(bounds >= 0, bdtr(np.maximum(bounds, 0), n - counts, share), 0.0)
    return float((binomial(counts, n, gained) * (below if for_pass else 1 - below)).sum())


def samples_to_decide(lost: float, gained: float, margin: float, level: float, power: float, most: int) -> int:
    """Return about the fewest samples with which the test that decides does so with `power`, but `most` at most.

    The power is that of the test itself at this very number. Whole numbers of flips make it rise and fall by a few points from
    one n to the next, so that a few samples fewer may do too.

    Args:
        lost: True share of the answers that the candidate loses.
        gained: True share that it gains.
        margin: The margin; a loss below it is to pass, one above it to fail.
        level: The level of the test.
        power: The wanted power.
        most: The number where the search ends.
    """
    for_pass = lost - gained < margin

    def decides(n: int) -> bool:
        return decision_power(n, lost, gained, margin, level, for_pass) >= power

    low, high = 1, max(8, math.ceil(paired_samples(lost, gained, margin, level, power)))
    while high < most and not decides(high):
        low, high = high, high + high // 16 + 1
    while high < most and high - low > max(1, high // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return min(high, most)
