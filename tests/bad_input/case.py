"""A case of bad input, the outcome of a command, and the contents of a directory."""

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def prepare_nothing(_: Path) -> None:
    """Create no files."""


@dataclass(frozen=True)
class BadInput:
    """Bad input: a command line, and the files in its directory."""

    name: str
    arguments: tuple[str, ...]
    expected: tuple[str, ...]
    """Texts that stderr must contain: the key or file, the value, and the words that identify the problem."""
    prepare: Callable[[Path], object] = prepare_nothing
    """Creates the files in the command's directory."""
    code: int = 2
    """Exit code."""
    runs_stage: bool = False
    """Whether the stage starts and finds the error itself, because it reads results of earlier commands."""
    loads_model: bool = False
    """Whether the error is found only after a library has read a file of the model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    unprivileged: bool = False
    """Whether to drop root's privileges, so that file permissions apply."""
    file_bytes: int | None = None
    """Maximum size in bytes of a written file, to simulate a full disk."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    code: int | None
    """Exit code; None if the command was stopped after a timeout."""
    stdout: str
    stderr: str
    heavy: tuple[str, ...]
    """Slow-to-import libraries that the command imported."""


def contents(directory: Path) -> dict[str, str]:
    """Return the contents of a directory: relative path -> mode, and digest, size or link target."""
    files = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            size = path.stat().st_size
            content = hashlib.sha256(path.read_bytes()).hexdigest() if size < 1 << 26 else f"{size} bytes"
        else:
            content = os.readlink(path) if stat.S_ISLNK(mode) else ""
        files[str(path.relative_to(directory))] = f"{stat.filemode(mode)} {content}"
    return files
