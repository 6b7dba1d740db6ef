"""Processes that a test started, found by what their environment holds: a folder of the test alone."""

import time
from contextlib import suppress
from pathlib import Path

import psutil


def processes_with(folder: Path) -> list[list[str]]:
    """Commands of the running processes, this one aside, whose environment names the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != psutil.Process().pid and any(str(folder) in value for value in process.environ().values()):
                found.append(process.cmdline())
    return found


def await_none_with(folder: Path, seconds: float = 30) -> None:
    """What was killed is gone when the kernel comes to it."""
    deadline = time.monotonic() + seconds
    while left := processes_with(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
