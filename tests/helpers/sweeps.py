"""Sweeps of small evaluations by real launchers: every job ends as its seed says (`small_sweeps/sitecustomize.py`)."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import await_none_with

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"


@dataclass(frozen=True)
class Swept:
    """How a sweep ended."""

    code: int
    stdout: str
    stderr: str
    summary: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Of its candidates."""
        return [candidate["name"] for candidate in self.summary["candidates"]]


@contextmanager
def started(folder: Path, seeds: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a sweep over seeds in `folder`; it writes into the files `stdout` and `stderr` there."""
    path = os.pathsep.join(map(str, (ROOT, HELPERS, HELPERS / "small_sweeps")))
    inherited = os.environ.get("PYTHONPATH")  # a launcher may be installed there
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{inherited}" if inherited else path, "HOME": str(folder)}
    command = [sys.executable, "-m", "pipeline", "-m", "stage=evaluate", f"seed={seeds}", *arguments]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, text=True, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()


def ended(folder: Path, process: subprocess.Popen[str], seconds: float = 500) -> Swept:
    """Wait for the end of a sweep, of which no process is left."""
    code = process.wait(seconds)
    await_none_with(folder)
    summary = json.loads((folder / "work" / "summary.json").read_text())
    return Swept(code, (folder / "stdout").read_text(), (folder / "stderr").read_text(), summary)


def sweep(folder: Path, seeds: str, *arguments: str) -> Swept:
    """Run a sweep over seeds in `folder`, untracked."""
    with started(folder, seeds, "tracking=none", *arguments) as process:
        return ended(folder, process)


def wait_for(folder: Path, pattern: str, count: int = 1, seconds: float = 300) -> list[Path]:
    """Return the files below the work directory that match, once there are so many."""
    end = time.monotonic() + seconds
    while len(found := sorted((folder / "work").glob(pattern))) < count:
        assert time.monotonic() < end, (folder / "stderr").read_text()
        time.sleep(0.1)
    return found
