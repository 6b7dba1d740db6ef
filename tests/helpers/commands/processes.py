"""Processes that a test started, recognized by a folder's path in their environment."""

import time
from contextlib import suppress
from pathlib import Path

import psutil


def processes_with(folder: Path) -> list[list[str]]:
    """Return the commands of all running processes whose environment names the folder, except this process."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != psutil.Process().pid and any(str(folder) in value for value in process.environ().values()):
                processes.append(process.cmdline())
    return processes


def await_none_with(folder: Path, seconds: float = 30) -> None:
    """Wait until `processes_with` finds none. The kernel removes a killed process with a delay."""
    deadline = time.monotonic() + seconds
    while remaining := processes_with(folder):
        assert time.monotonic() < deadline, remaining
        time.sleep(0.05)
