"""Checks of the work directory, memory and disk before any work, so that a late failure becomes an early one-line error."""

import os
import shutil
from pathlib import Path

import psutil
from rich.filesize import decimal

from stages.core.errors import MissingRequirement, UserError, short
from stages.core.files import ARTIFACTS

BELOW = 240
"""Length in bytes of the longest path that kvgate makes below the work directory."""
MAX_PATH = 4095
MAX_NAME = 255
"""Limit in bytes of every file system that matters here."""

FOLDERS = (ARTIFACTS, "mlartifacts", "summaries", "sweep")
FILES = ("summary.json", "report.html", "junit.xml", "mlflow.db", "mlflow.db.lock", ".summary.json.lock")


def check_contents(work: Path, key: str) -> None:
    """Refuse a work directory that is a file, or that has a file in the place of a folder or the reverse."""
    name = f"workdir={key}"
    if os.path.lexists(work) and not work.is_dir():
        raise UserError(f"{name}: is not a directory; give one, or a path that does not exist yet")
    for kind, names, is_kind in (("directory", FOLDERS, Path.is_dir), ("file", FILES, Path.is_file)):
        for inside in names:
            if os.path.lexists(work / inside) and not is_kind(work / inside):
                raise UserError(f"{name}: {inside} in it is not a {kind}; move it away")


def check_workdir(work: Path, key: str) -> None:
    """Refuse a work directory that cannot be written to, without creating anything."""
    name = f"workdir={key}"
    if any(len(os.fsencode(part)) > MAX_NAME for part in work.parts) or len(os.fsencode(work)) + BELOW > MAX_PATH:
        raise UserError(
            f"workdir={short(key, 60)}: its absolute path has {len(os.fsencode(work)):,} bytes, which is too long; give a path "
            f"of at most {MAX_PATH - BELOW:,} bytes, with at most {MAX_NAME} in each name"
        )
    check_contents(work, key)
    there = next(place for place in (work, *work.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UserError(f"{name}: {there} is not a directory; give another path")
    for place in (there, *(work / folder for folder in FOLDERS if (work / folder).is_dir())):
        if not os.access(place, os.W_OK | os.X_OK):
            raise MissingRequirement(f"{name}: {place} cannot be written to; give a workdir that this user may write to")


COPIES = 2
"""Minimum number of copies of the weights that a first evaluation writes: the quantized checkpoint and the engine."""


def check_room(work: Path, key: str, weight_bytes: int) -> None:
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if weight_bytes > memory:
        raise MissingRequirement(
            f"model.path: its weights take {decimal(weight_bytes)}, this machine has {decimal(memory)} of memory: "
            f"{decimal(weight_bytes - memory)} are missing"
        )
    if (work / ARTIFACTS).exists():  # earlier artifacts are reused
        return
    free = shutil.disk_usage(next(place for place in (work, *work.parents) if place.is_dir())).free
    needed = COPIES * weight_bytes
    if needed > free:
        raise MissingRequirement(
            f"workdir={key}: the model's artifacts take {decimal(needed)}, its disk has {decimal(free)} free: "
            f"{decimal(needed - free)} are missing; free some, or give another workdir"
        )


def check_memory(key: str, cache_bytes: int, sequences: int, tokens: int, batch_key: str) -> None:
    """Refuse sequences whose cache exceeds this machine's memory. `key` sets their length, `batch_key` their number."""
    memory = psutil.virtual_memory().total
    if cache_bytes > memory:
        raise UserError(
            f"{key}: with {sequences} sequences of {tokens:,} tokens the cache takes {decimal(cache_bytes)}, this machine has "
            f"{decimal(memory)} of memory: {decimal(cache_bytes - memory)} are missing; lower it: about "
            f"{tokens * memory // cache_bytes:,} tokens fit, or lower {batch_key}"
        )
