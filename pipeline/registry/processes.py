"""The process that a tracked run belongs to, and whether it still runs."""

import os
import socket
from pathlib import Path


def host() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def process_start(pid: int) -> str | None:
    """Return when a running process started, in clock ticks since boot.

    A system uses a pid again after a while, but not a pid together with its start.

    Returns:
        None when the process is dead, "" where the system does not tell its start.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The command's name may contain spaces and brackets, so that fields are counted after the last bracket (proc(5)).
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def identity() -> dict[str, str]:
    """Return the tags that name this process."""
    return {"host": host(), "pid": str(os.getpid()), "pid_start": process_start(os.getpid()) or ""}


def alive(tags: dict[str, str]) -> bool:
    """Return whether the process that wrote these tags on this host still runs."""
    start = process_start(int(tags["pid"]))
    return start is not None and start == tags.get("pid_start", start)
