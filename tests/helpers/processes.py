"""Processes that a test started: those whose environment names a folder of the test alone, and servers that come up."""

import socket
import subprocess
import time
import urllib.request
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def await_up(address: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    """Wait until a server says that it is well."""
    deadline = time.monotonic() + seconds
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
