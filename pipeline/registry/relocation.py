"""A work directory that was moved: MLflow's SQLite store has absolute addresses of the files of runs and model versions."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.registry.tracking import Location

ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
"""Tables of MLflow's schema, and their columns with an address."""


def follow_move(location: Location, database: Path) -> None:
    """Change the addresses in a SQLite store whose files were moved to where this work directory keeps them.

    Only of files that are not where the store says, and are here.
    """
    if location.artifact_root is None or not database.is_file() or not _path(location.artifact_root).is_dir():
        return
    # A fresh file has no tables yet, and a damaged one is reported by whoever opens it next.
    with closing(sqlite3.connect(database, timeout=location.timeout_s)) as store, suppress(sqlite3.DatabaseError):
        for (old,) in store.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall():
            if old != location.artifact_root and _moved(store, old, location.artifact_root):
                _rewrite(store, old, location.artifact_root)


def _moved(store: sqlite3.Connection, old: str, new: str) -> bool:
    if not old.startswith("file:") or _path(old).exists():
        return False
    runs = store.execute("SELECT artifact_uri FROM runs WHERE artifact_uri LIKE ? || '/%'", (old,))
    return any(_path(new + address.removeprefix(old)).exists() for (address,) in runs)


def _rewrite(store: sqlite3.Connection, old: str, new: str) -> None:
    with store:
        for table, column in ADDRESSES:
            below = f"substr({column}, 1, ?) = ?"
            change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR {below}"
            store.execute(change, (new, len(old) + 1, old, len(old) + 1, f"{old}/"))


def _path(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))
