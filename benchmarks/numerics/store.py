"""Measurements that an interrupted run has made, so that the next one goes on from there."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.digest import code_digest, files_digest, json_digest, tree_files
from stages.evaluate.distances.distance import StepStatistics

CODE = ("benchmarks.numerics.measure", "benchmarks.numerics.eviction")
"""What computes a measurement: nothing that another version of it made is taken."""


class Store:
    """Arrays by the digest of all that they were computed from.

    Args:
        folder: Where they are kept.
        checkpoint: The model.
    """

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._identity = [*map(code_digest, CODE), files_digest(tree_files(checkpoint))]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def statistics(self, key: object, compute: Callable[[], StepStatistics]) -> StepStatistics:
        """Return the statistics of a key, computed if they are not kept."""
        names = [item.name for item in fields(StepStatistics)]
        stacked = self.array(key, lambda: _stacked(compute(), names))
        columns = [
            row.astype(np.int64) if name == "greedy" else np.array(row) for name, row in zip(names, stacked, strict=True)
        ]
        return StepStatistics(*columns)

    def array(self, key: object, compute: Callable[[], npt.NDArray[np.floating]]) -> npt.NDArray[np.floating]:
        """Return the array of a key as a map of its file, computed if it is not kept."""
        path = self._folder / f"{json_digest([self._identity, key])}.npy"
        if not path.is_file():
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                np.save(file, compute(), allow_pickle=False)
            os.replace(part, path)
        kept: npt.NDArray[np.floating] = np.load(path, mmap_mode="r", allow_pickle=False)
        return kept


def _stacked(steps: StepStatistics, names: list[str]) -> npt.NDArray[np.floating]:
    return np.stack([getattr(steps, name).astype(np.float64) for name in names])
