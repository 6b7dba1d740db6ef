"""Tracking stores that tests make."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.shared import once


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
