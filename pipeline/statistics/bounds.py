"""Bounds of means, of shares of events and of slopes, where samples share documents.

**Means: testing by betting.** Distances are heavy-tailed. Of 160 requests to a sound FP8 cache a single one may carry nearly
all of the KL, and a bootstrap of samples that missed such a request is sure of itself: at the threshold it passes a third of
the time. A bet makes no assumption but a bound: the **wealth**, which starts at 1 and is multiplied for every document's x by
`1 + f (limit - x) / (worst - limit)`, never falls below 0 while x <= worst, and where the true mean is `limit` or more its
expectation stays at most 1. By Ville's inequality it then ever reaches 1 / alpha with a probability of at most alpha, over all
looks together and over samples that are added later. That is the test, its inversion is the bound (Waudby-Smith and Ramdas,
JRSS B 86 (2024) 1-27).

Where all x are 0 and f is 1 the bound is exactly the rule of three, `worst (1 - alpha^(1/n))`: nothing without assumptions
is tighter there. The share f is a mixture of a few, so that the wealth does not depend on the order of the documents.

`python -m benchmarks.gate_distances` shows how often it passes wrongly on shapes that were measured.

**Events: clusters.** Samples of one document depend on each other. Counts are divided by the design effect 1 + (m - 1) rho, m
being the mean size of a sample's document (Kish, Survey Sampling (1965); Rao and Scott, Biometrics 48 (1992) 577-585). rho, how
alike the events of a document are, is estimated from pairs of samples, and shrunk towards a value above what was measured on a
real model: the few flips of a harmless candidate say next to nothing about it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, ndtri, stdtrit

Array = npt.NDArray[np.float64]

SHARES_FOR_PASS = (0.4, 0.9)
"""Mixture of the shares f that are bet on a mean below the limit: sound engines are far below it and vary little."""
SHARES_OF_WHOLE = (1.0,)
"""The same where outliers count whole. A document as bad as the worst that is allowed for ends the bet. Of few sound documents
no smaller bet shows enough; of many, Student's t shows more than any bet."""
SHARES_FOR_FAIL = (0.05, 0.3, 0.9)
"""Those bet on a mean above the limit, where a few documents may have nearly all of it."""
EVENT_CORRELATION = 0.15
"""What the correlation of flips, or of ruined requests, within a document is taken for before there are any. Questions about
one page to SmolLM2 have 0.06 at most, over six policies. `python -m benchmarks.gate_clusters` shows up to which correlation the
gate on answers keeps its level with it; with 0.2 a harmless
candidate of 40 documents of four passes too rarely."""
PRIOR_DOCUMENTS = 10
"""That takes the place of as many documents with events."""
HALVINGS = 14
"""Of the range that a bound lies in: it is found to 1e-4 of that."""


def document_sums(documents: Sequence[str], *columns: npt.ArrayLike) -> list[Array]:
    """Return each document's sum of every column of the samples, shape (documents,)."""
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    return [np.asarray(np.bincount(index, weights=np.asarray(column)), np.float64) for column in columns]


def by_document(values: Sequence[float | None], weights: Sequence[float], documents: Sequence[str]) -> Array:
    """Return each document's weighted mean, shape (documents,); NaN where a value is missing.

    Documents are independent of each other, samples are not.
    """
    with np.errstate(over="ignore"):  # a sum that no float64 holds is infinite, which fails a gate
        sums, total = document_sums(documents, np.asarray(values, np.float64) * np.asarray(weights), weights)
        return sums / total


def document_totals(values: Sequence[float | None], documents: Sequence[str]) -> Array:
    """Return each document's sum, over the mean size of a document, shape (documents,); NaN where a value is missing.

    The mean of these is the mean of all samples.
    """
    (totals,) = document_sums(documents, np.asarray(values, np.float64))
    return np.asarray(totals * len(totals) / len(values))


def log_wealth_below(values: Array, limit: float, worst: float, shares: Sequence[float] = SHARES_FOR_PASS) -> float:
    """Return the log of the wealth against "the mean is `limit` or more"; neither it nor a value is above `worst`."""
    return float(log_wealth(gains(limit - values, worst - limit), shares))


def log_wealth_above(values: Array, limit: float, best: float) -> float:
    """Return the log of the wealth against "the mean is `limit` or less"; neither it nor a value is below `best`."""
    return float(log_wealth(gains(values - limit, limit - best), SHARES_FOR_FAIL))


def gains(won: Array, most_lost: float) -> Array:
    """Return what a bet of everything would add for each document.

    Where nothing can be lost, because the limit is the farthest that a value can be, its hypothesis says that every value is
    the limit: a value that is adds nothing, and any other contradicts it with certainty.
    """
    return won / most_lost if most_lost > 0 else np.where(won > 0, math.inf, 0.0)


def log_steps(won: Array, share: float) -> Array:
    """Return by how much each document moves the log of the wealth; by minus infinity where everything was bet and lost."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log1p(share * np.maximum(won, -1.0)))


def log_wealth(won: Array, shares: Sequence[float]) -> Array:
    """Return the log of the mean wealth over `shares`: (..., n) -> (...). `won` is what a bet of everything adds."""
    logs = [log_steps(won, share).sum(axis=-1) for share in shares]
    return np.asarray(np.logaddexp.reduce(logs) - math.log(len(shares)))


def documents_to_reach(steps: Array, enough: float, power: float) -> float:
    """Return about how many steps like these reach `enough` with a probability of `power`; infinite where they do not grow."""
    growth = float(steps.mean())
    if not growth > 0:
        return math.inf
    spread = float(ndtri(power)) * float(steps.std())
    return math.ceil(((spread + math.sqrt(spread * spread + 4 * growth * enough)) / (2 * growth)) ** 2)


def upper_bound(values: Array, alpha: float, worst: float, shares: Sequence[float] = SHARES_FOR_PASS) -> float:
    """Return the one-sided 1 - alpha upper bound of a mean whose values are at most `worst`, which it is where they are few."""
    enough = -math.log(alpha)
    return _crossing(float(values.mean()), worst, lambda limit: log_wealth_below(values, limit, worst, shares) >= enough)


def lower_bound(values: Array, alpha: float, best: float) -> float:
    """Return the one-sided 1 - alpha lower bound of a mean whose values are at least `best`, which it is where they are few."""
    enough = -math.log(alpha)
    return _crossing(float(values.mean()), best, lambda limit: log_wealth_above(values, limit, best) >= enough)


def skewed_upper_bound(values: Array, alpha: float) -> Array:
    """Return the one-sided 1 - alpha upper bound of a mean by Student's t, transformed for skewed values: (..., n) -> (...).

    The values are many. Plain t errs more often where a few of them have most of the loss. Source: Hall, JRSS B 54 (1992) 221.
    """
    n, mean, spread = values.shape[-1], values.mean(axis=-1), values.std(axis=-1, ddof=1)
    scale = np.where(spread > 0, spread, 1.0)
    skew = (((values - mean[..., None]) / scale[..., None]) ** 3).mean(axis=-1)
    score = stdtrit(n - 1, alpha) / math.sqrt(n) - skew / (6 * n)
    # Hall's cubic of the score, solved for the limit; without skew it is the score.
    slope = np.where(np.abs(skew) < 1e-6, 1.0, skew)
    solved = np.where(np.abs(skew) < 1e-6, score, 3 / slope * (np.cbrt(1 + slope * score) - 1))
    return np.asarray(mean - spread * solved)


def documents_for_t(values: Array, limit: float, alpha: float, power: float) -> float:
    """Return about how many documents like these show by Student's t that their mean is below the limit; infinite if above."""
    gap = limit - float(values.mean())
    return float(((ndtri(1 - alpha) + ndtri(power)) * values.std() / gap) ** 2) if gap > 0 else math.inf


def _crossing(mean: float, farthest: float, rejected: Callable[[float], bool]) -> float:
    """Return the limit nearest to the mean that is rejected; those between it and `farthest` are too."""
    inside, outside = mean, farthest
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
    return outside


def design_effect(sums: Array, squares: Array, sizes: Array, prior: float) -> float:
    """Return how many samples of these documents are worth one independent sample, at least 1.

    Of each document: the sum of its values, -1, 0 or 1 each, the sum of their squares, and its samples, shape (documents,).
    """
    n, pairs = float(sizes.sum()), float((sizes * (sizes - 1)).sum())
    if pairs == 0:
        return 1.0
    mean = float(sums.sum()) / n
    variance = float(squares.sum()) / n - mean * mean
    # products of the residuals of all ordered pairs of samples in a document
    products = (sums - sizes * mean) ** 2 - (squares - 2 * mean * sums + sizes * mean * mean)
    estimate = float(products.sum()) / (pairs * variance) if variance > 0 else prior
    eventful = int(np.count_nonzero(squares))
    correlation = (PRIOR_DOCUMENTS * prior + eventful * min(max(estimate, 0.0), 1.0)) / (PRIOR_DOCUMENTS + eventful)
    return 1 + pairs / n * correlation


def share_bound(count: float, n: float, alpha: float, lower: bool) -> float:
    """Return the one-sided 1 - alpha bound of the share of events, of which `count` were seen in n samples (Clopper-Pearson).

    Where none were seen it is the rule of three. Counts that a design effect divided need not be whole.
    """
    if lower:
        return float(betaincinv(count, n - count + 1, alpha)) if count > 0 else 0.0
    return float(betaincinv(count + 1, n - count, 1 - alpha)) if count < n else 1.0


def clustered_slope(x: Array, y: Array, documents: Sequence[str]) -> tuple[float, float]:
    """Return the least-squares slope of y on x and its standard error, which documents are left out for one by one.

    That jackknife (Bell and McCaffrey's CR3) holds for outliers and unequal variances; x is not constant.
    """
    parts = np.stack(document_sums(documents, np.ones_like(x), x, y, x * x, x * y))
    total = parts.sum(axis=1)

    def slope(sums: Array) -> Array:
        n, sx, sy, sxx, sxy = sums
        with np.errstate(all="ignore"):
            return np.asarray((n * sxy - sx * sy) / (n * sxx - sx * sx))

    whole, without = float(slope(total)), slope(total[:, None] - parts)
    count = len(without)
    return whole, math.sqrt((count - 1) / count * float(((without - whole) ** 2).sum()))
