"""Artifacts and tracking stores that tests make."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.shared import once
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe


def make_artifact(store: Store, recipe: Recipe, fill: Callable[[Path], None], *, resumable: bool = False) -> Artifact:
    """Return the artifact of a recipe: verified and reused if it exists, else made by `fill`."""
    with store.making(recipe, resumable=resumable) as entry:
        if entry.artifact is None:
            fill(entry.scratch)
    return entry.made


@contextmanager
def migrate_once(factory: pytest.TempPathFactory) -> Iterator[None]:
    """Within the block, let new SQLite stores begin as a copy of one: MLflow's migrations of an empty database take seconds."""
    import sqlalchemy
    from mlflow.store.db import utils

    initialize: Any = utils._initialize_tables
    is_empty: Any = utils._is_empty_database

    def migrate(folder: Path) -> None:
        folder.mkdir()
        engine = sqlalchemy.create_engine(f"sqlite:///{folder / 'mlflow.db'}")
        initialize(engine)
        engine.dispose()

    template = once(factory, "migrated", migrate) / "mlflow.db"

    def copy(engine: Any) -> None:
        if engine.dialect.name != "sqlite" or not is_empty(engine):
            initialize(engine)
            return
        with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(engine.url.database)) as target:
            source.backup(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_initialize_tables", copy)
        yield
