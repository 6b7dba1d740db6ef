"""Artifacts that tests make."""

from collections.abc import Callable
from pathlib import Path

from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe


def make_artifact(store: Store, recipe: Recipe, fill: Callable[[Path], None], *, resumable: bool = False) -> Artifact:
    """Return the artifact of a recipe: verified and reused if it exists, else made by `fill`."""
    with store.making(recipe, resumable=resumable) as entry:
        if entry.artifact is None:
            fill(entry.scratch)
    return entry.made
