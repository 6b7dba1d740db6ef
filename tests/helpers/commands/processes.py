"""Processes that a test started, recognized by a folder's path in their environment, and waiting for servers to start."""

import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil


def processes_with(folder: Path) -> list[list[str]]:
    """Return the commands of all running processes whose environment names the folder, except this process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != psutil.Process().pid and any(str(folder) in value for value in process.environ().values()):
                found.append(process.cmdline())
    return found


def await_none_with(folder: Path, seconds: float = 30) -> None:
    """Wait until no such process runs. The kernel removes a killed process with a delay."""
    deadline = time.monotonic() + seconds
    while left := processes_with(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def await_up(address: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    """Wait until a server reports that it is healthy."""
    deadline = time.monotonic() + seconds
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
