"""Corrects or refuses a moved or copied tracking store. MLflow's database holds the absolute addresses of its files."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.registry.tracking import Location
from stages.core.errors import UserError

ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow's database with the absolute address of a file or folder."""


def path_of(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def follow_move(location: Location) -> None:
    """Correct the absolute addresses in a SQLite store that was moved with its work directory."""
    new = location.artifact_root
    if location.file is None or new is None or path_of(new).parent != location.file.parent or not path_of(new).is_dir():
        return
    with closing(sqlite3.connect(location.file, timeout=location.timeout_s)) as store, store:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        for (old,) in store.execute(query, [location.experiment]).fetchall():
            before = path_of(old)
            if before.name != path_of(new).name or before.exists() or before.with_name(location.file.name).exists():
                continue  # the store was not moved, or is a copy, or its files are elsewhere on purpose
            for table, column in ADDRESSES:
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?"
                store.execute(moved, [new, len(old) + 1, len(old) + 1, f"{old}/"])


def check_files(location: Location, address: str) -> None:
    """Refuse a store whose files were moved without it, and a copy of a SQLite store."""
    if location.artifact_root is None or address == location.artifact_root or not address.startswith("file:"):
        return
    old, new = path_of(address), path_of(location.artifact_root)
    if new.is_dir() and not old.exists():
        raise UserError(
            f"{location} has its files in {old}, which was moved to {new}: move it back, or let the old path lead to "
            f"the new one: mkdir -p {old.parent} && ln -s {new} {old}"
        )
    if location.file is not None and location.file.parent == new.parent and old.resolve() != new.resolve():
        raise UserError(
            f"{location} is a copy, which would write into the original's files in {old}: give the original's workdir, "
            f"or begin a store here: rm -r {location.file} {new}"
        )
