"""What lies in a store: artifacts, unfinished work and shared files, with their bytes. Artifacts share files by hard links."""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.artifacts.files import POOL
from pipeline.artifacts.locks import locked_at_once
from pipeline.artifacts.store import MANIFEST, PARTIAL, SCRATCH, lock_of


@dataclass(frozen=True)
class File:
    """A file as it lies on disk; names that share `number` share its bytes."""

    number: tuple[int, int]
    """Device and inode."""
    size: int
    links: int
    """How many names it has, wherever they are."""


@dataclass(frozen=True)
class Piece:
    """A directory of a store, or a file of its pool: what is removed whole, or stays whole."""

    place: str
    """Relative to the store's root: `build/0bbee01def1948b5e69ef32590a029cc`."""
    kind: str
    """Stage of an artifact, else `unfinished`, `scratch` or `pool`."""
    path: Path
    files: tuple[File, ...]
    made: float
    """When it was finished, or written to last, in seconds since 1970."""

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What an artifact was made from, as its manifest says it; nothing where that cannot be read."""
        try:
            parts = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))["parts"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return parts if isinstance(parts, dict) else {}

    @property
    def label(self) -> str:
        """What a person knows it by: the policy and the library of a plan, where its manifest names them, and its place."""
        config = self.parts.get("config")
        config = config if isinstance(config, dict) else {}
        policy = config.get("kv")
        known = (policy.get("name") if isinstance(policy, dict) else None, config.get("library"))
        return " ".join([*(name for name in known if isinstance(name, str)), self.path.name.lstrip(".")[:8]])


UNFINISHED, SCRATCH_KIND, POOL_KIND = "unfinished", "scratch", "pool"


@dataclass(frozen=True)
class Disk:
    """A store as it was read."""

    root: Path
    artifacts: dict[str, Piece] = field(default_factory=dict)
    """Place -> artifact."""
    unfinished: tuple[Piece, ...] = ()
    """Evaluations and searches that the same command would go on with."""
    scratch: tuple[Piece, ...] = ()
    """What is being made, or was being made by a process that died."""
    pool: tuple[Piece, ...] = ()
    """Files that came from outside, one copy of each, which artifacts link to."""

    @property
    def pieces(self) -> list[Piece]:
        """Everything."""
        return [*self.artifacts.values(), *self.unfinished, *self.scratch, *self.pool]


def read_disk(root: Path) -> Disk:
    """Return what lies in a store; an empty one where there is no store. Nothing is written."""
    artifacts, scratch = {}, []
    for stage in _directories(root):
        if stage.name.startswith("."):
            continue
        for directory in _directories(stage):
            if SCRATCH.fullmatch(directory.name):
                scratch.append(_piece(root, SCRATCH_KIND, directory))
            elif (directory / MANIFEST).is_file():
                piece = _piece(root, stage.name, directory)
                artifacts[piece.place] = piece
    unfinished = [_piece(root, UNFINISHED, key) for stage in _directories(root / PARTIAL) for key in _directories(stage)]
    pool = [_piece(root, POOL_KIND, path) for path in sorted((root / POOL).glob("*")) if path.is_file()]
    return Disk(root, artifacts, tuple(unfinished), tuple(scratch), tuple(pool))


def distinct_bytes(pieces: Iterable[Piece]) -> int:
    """Return the bytes of pieces; those that several of them share are counted once."""
    return sum(file.size for file in _distinct(pieces).values())


def freed_bytes(gone: Iterable[Piece]) -> int:
    """Return the bytes that are free once these pieces are gone: those of files that have no other name."""
    gone = list(gone)
    names = names_held(gone)
    return sum(file.size for file in _distinct(gone).values() if names[file.number] >= file.links)


def names_held(pieces: Iterable[Piece]) -> Counter[tuple[int, int]]:
    """Return how many names pieces hold of each file."""
    return Counter(file.number for piece in pieces for file in piece.files)


def by_kind(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Return pieces by their kind, the kinds in the order in which they come."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.kind, []).append(piece)
    return found


def is_being_made(piece: Piece) -> bool:
    """Return whether a living process makes the artifact of this scratch or unfinished work."""
    made = SCRATCH.fullmatch(piece.path.name)
    if made is not None:
        target = piece.path.with_name(made[1])
    else:
        target = piece.path.parents[2] / piece.path.parent.name / piece.path.name[:32]
    lock = lock_of(target)
    if not lock.is_file():
        return False
    with locked_at_once(lock) as free:
        return not free


def _distinct(pieces: Iterable[Piece]) -> dict[tuple[int, int], File]:
    return {file.number: file for piece in pieces for file in piece.files}


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _piece(root: Path, kind: str, path: Path) -> Piece:
    made = 0.0
    with suppress(FileNotFoundError):  # another process finished or removed it
        manifest = path / MANIFEST
        made = manifest.stat().st_mtime if manifest.is_file() else max(_times(path))
    return Piece(path.relative_to(root).as_posix(), kind, path, tuple(_files(path)), made)


def _times(path: Path) -> Iterator[float]:
    yield path.lstat().st_mtime
    for inner in path.rglob("*") if path.is_dir() else ():
        yield inner.lstat().st_mtime


def _files(path: Path) -> Iterator[File]:
    if not path.is_dir():
        yield from _file(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield from _file(Path(folder, name))


def _file(path: Path) -> Iterator[File]:
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(about.st_mode):
        yield File((about.st_dev, about.st_ino), about.st_size, about.st_nlink)
