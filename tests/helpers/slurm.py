"""A stand-in for Slurm on this machine, so that submitit's Slurm executor runs: its script, its jobs, what it asks sacct."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slurm_commands import COMMANDS, FOLDER


@dataclass(frozen=True)
class Slurm:
    """One that accepts jobs."""

    folder: Path

    def run(self, command: str, *arguments: str) -> str:
        """Run one of its commands, and return what it prints."""
        return subprocess.check_output([self.folder / "bin" / command, *arguments], text=True, timeout=60)

    def asked(self, job: int = 1001) -> dict[str, Any]:
        """Return the options of a job."""
        found: dict[str, Any] = json.loads((self.folder / f"{job}.json").read_text())
        return found

    def states(self, job: int = 1001) -> list[str]:
        """Return the states of a job's tasks."""
        files = sorted(self.folder.glob(f"{job}_*.json"), key=lambda file: int(file.stem.partition("_")[2]))
        return [json.loads(file.read_text())["state"] for file in files]


@contextmanager
def slurm(folder: Path, environ: Any) -> Iterator[Slurm]:
    """Put its commands on the PATH of `environ`, which is a test's to change (`monkeypatch`); at the end nothing of it runs."""
    (folder / "bin").mkdir(parents=True)
    script = Path(__file__).with_name("slurm_commands.py")
    for name in COMMANDS:
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" {name} "$@"\n')
        command.chmod(0o755)
    environ.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    environ.setenv(FOLDER, str(folder))
    try:
        yield Slurm(folder)
    finally:
        for file in folder.glob("controller-*.pid"):
            with suppress(psutil.NoSuchProcess):
                controller = psutil.Process(int(file.read_text()))
                if controller.cmdline()[-2:-1] == ["controller"]:
                    for process in [*controller.children(recursive=True), controller]:
                        process.send_signal(signal.SIGKILL)
