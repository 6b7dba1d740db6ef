"""Bootstrap by document, deterministic because of a fixed seed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from stages.verdict.statistics.bets import Array, document_sums

REPLICATES = 2000
SEED = 20_260_101


def resampled_sums(sums: Array, documents: Sequence[str]) -> Array:
    """Resample the rows of `sums` by document: (rows, columns) -> column sums of every replicate, (REPLICATES, columns)."""
    clustered = np.stack(document_sums(documents, *sums.T), axis=1)
    return _draws(len(clustered)) @ clustered


@lru_cache(maxsize=16)
def _draws(count: int) -> Array:
    drawn = np.random.default_rng(SEED).integers(count, size=(REPLICATES, count))
    drawn += np.arange(REPLICATES)[:, None] * count
    return np.bincount(drawn.ravel(), minlength=REPLICATES * count).reshape(REPLICATES, count).astype(np.float64)
