"""What lies in a store: artifacts, and unfinished work, with their bytes. Artifacts share files by hard links."""

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.store import MANIFEST, PARTIAL, SCRATCH

UNFINISHED, SCRATCH_KIND = "unfinished", "scratch"
"""Kinds of pieces that are no artifacts: what the same command goes on with, and what is being made or was when it died."""


@dataclass(frozen=True)
class Piece:
    """A directory of a store that is removed whole, or stays whole."""

    place: str
    """Relative to the store's root: `build/0bbee01def1948b5e69ef32590a029cc`."""
    kind: str
    """Stage of an artifact, else one of the kinds above."""
    path: Path
    files: Mapping[tuple[int, int], int]
    """Device and inode of each file -> its bytes, which other names of the inode share."""
    made: float
    """When it was last written to, in seconds since 1970."""

    @property
    def is_artifact(self) -> bool:
        return self.kind not in (UNFINISHED, SCRATCH_KIND)


def walk(root: Path) -> list[Piece]:
    """Return every piece of a store; none where there is no store. Nothing is written."""
    found = []
    for directory in sorted(root.glob("[!.]*/*")):
        if not directory.is_dir() or directory.is_symlink():
            continue
        if SCRATCH.fullmatch(directory.name):
            found.append(_piece(root, SCRATCH_KIND, directory))
        elif (directory / MANIFEST).is_file():
            found.append(_piece(root, directory.parent.name, directory))
    return found + [_piece(root, UNFINISHED, directory) for directory in sorted((root / PARTIAL).glob("*/*"))]


def distinct_bytes(pieces: Iterable[Piece]) -> int:
    """Return the bytes of pieces; those that several of them share are counted once."""
    return sum({file: size for piece in pieces for file, size in piece.files.items()}.values())


def _piece(root: Path, kind: str, path: Path) -> Piece:
    files, made = dict[tuple[int, int], int](), 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # another process finished or removed it
                about = Path(folder, name).lstat()
                made = max(made, about.st_mtime)
                if stat.S_ISREG(about.st_mode):
                    files[about.st_dev, about.st_ino] = about.st_size
    return Piece(path.relative_to(root).as_posix(), kind, path, files, made)
