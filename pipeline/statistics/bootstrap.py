"""Bootstraps by document. They are deterministic: all have one seed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pipeline.statistics.bounds import Array, document_sums

REPLICATES = 2000
SEED = 20_260_101


def resampled_sums(sums: Array, documents: Sequence[str]) -> Array:
    """Resample `sums`, shape (rows, columns), by document and return the column sums, shape (REPLICATES, columns)."""
    clustered = np.stack(document_sums(documents, *sums.T), axis=1)
    return _draws(len(clustered)) @ clustered


@lru_cache(maxsize=16)
def _draws(count: int) -> Array:
    drawn = np.random.default_rng(SEED).integers(count, size=(REPLICATES, count))
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
