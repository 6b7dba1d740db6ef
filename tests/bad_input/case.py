"""A case of bad input, the result of a command, and the contents of a directory."""

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def nothing(_: Path) -> None:
    """Prepare no files."""


@dataclass(frozen=True)
class Case:
    """Bad input: a command line, and the files in its directory."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    """Texts that stderr must contain: the key or file, the value, and the words that identify the problem."""
    prepare: Callable[[Path], object] = nothing
    """Creates the files in the command's directory."""
    code: int = 2
    begins: bool = False
    """Whether the stage itself reads the results of earlier commands, so that the stage has to refuse."""
    loads_model: bool = False
    """Whether the error shows only after a library has read a file of the model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    unprivileged: bool = False
    """Whether to drop root's privileges, so that file permissions apply."""
    file_bytes: int | None = None
    """Maximum size in bytes of a written file, to simulate a full disk."""


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    code: int | None
    """Exit code; None if the command was stopped after a timeout."""
    stdout: str
    stderr: str
    heavy: tuple[str, ...]
    """Slow-to-import libraries that the command imported."""


def contents(directory: Path) -> dict[str, str]:
    """Return the contents of a directory: relative path -> mode and, for a file, the digest of its bytes."""
    files = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            size = path.stat().st_size
            about = hashlib.sha256(path.read_bytes()).hexdigest() if size < 1 << 26 else f"{size} bytes"
        else:
            about = os.readlink(path) if stat.S_ISLNK(mode) else ""
        files[str(path.relative_to(directory))] = f"{stat.filemode(mode)} {about}"
    return files
