"""A case of bad input, the process that runs cases, and the checks on refusals."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bad_input import forks

ROOT = Path(__file__).resolve().parents[2]
ERROR = "pipeline: error: "

FIXES = re.compile(
    r"\b(give|given|set|use|choose|must|should|did you mean|remove|save|download|convert|leave|needs?|add|write|run|make|"
    r"install|is missing|put|free|start|raise|lower|export|copy|correct|change|quote|name|keep|judge|move|take|wait|list)\b"
)
"""Verbs that a suggested fix contains."""


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


class Commands:
    """The process that runs command lines (`bad_input.forks`)."""

    def __enter__(self) -> Self:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        kept = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bad_input.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, case: Case, directory: Path, seconds: float = 60) -> Outcome:
        """Run a case's command in a directory. A hanging command is stopped after `seconds`."""
        request: dict[str, Any] = {
            "arguments": case.arguments,
            "directory": str(directory),
            "environment": dict(case.environment),
            "unprivileged": case.unprivileged,
            "file_bytes": case.file_bytes,
            "begins": case.begins or case.loads_model,
            "limited": True,
            "seconds": seconds,
        }
        if case.loads_model:  # These libraries take seconds to import, and the test process has them already.
            import_module("transformers.modeling_gguf_pytorch_utils")
            answer = forks.answer(request)
        else:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        return Outcome(answer["code"], answer["stdout"], answer["stderr"], tuple(answer["heavy"]))


def contents(directory: Path) -> dict[str, str]:
    """Return the contents of a directory: relative path -> mode and, for a file, the digest of its bytes."""
    found = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            size = path.stat().st_size
            about = hashlib.sha256(path.read_bytes()).hexdigest() if size < 1 << 26 else f"{size} bytes"
        else:
            about = os.readlink(path) if stat.S_ISLNK(mode) else ""
        found[str(path.relative_to(directory))] = f"{stat.filemode(mode)} {about}"
    return found


def broken_promises(case: Case, commands: Commands, directory: Path) -> list[str]:
    """Prepare and run a case in an empty directory; return the failed checks followed by the command's output, or nothing."""
    case.prepare(directory)
    before = contents(directory)
    outcome = commands.run(case, directory)
    broken = _broken(case, outcome, before, contents(directory))
    return [*broken, outcome.stderr, outcome.stdout] if broken else []


def _broken(case: Case, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    # progress lines of slow commands start with spaces
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith("  ")]
    broken = []
    if outcome.code is None:
        broken.append("it did not end")
    elif outcome.code != case.code:
        broken.append(f"exit code {outcome.code} instead of {case.code}")
    if "Traceback" in outcome.stderr:
        broken.append("a traceback")
    if len(lines) != 1 or not lines[0].startswith(ERROR):
        broken.append(f"{len(lines)} lines instead of one")
    for part in case.says:
        if part not in outcome.stderr:
            broken.append(f"{part!r} is not said")
    if not all(FIXES.search(line) for line in lines):
        broken.append("no fix")
    if not outcome.stderr.replace("\n", "").isprintable() or any(len(line) > 1500 for line in lines):
        broken.append("a line that a terminal does not show well")
    if outcome.stdout and not (case.begins or case.loads_model):
        broken.append("output")
    if outcome.heavy and not case.loads_model:
        broken.append(f"imported {', '.join(outcome.heavy)}")
    if before != after:
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        broken.append(f"it changed {', '.join(changed)}")
    return broken
