"""Which process a tracked run belongs to, and whether it still lives."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def host() -> str:
    return socket.gethostname()


def process_start(pid: int) -> str | None:
    """When a living process started, in clock ticks since boot; None when it is dead. "" where the system does not tell.

    A pid is used again after a while; pid and start together are not.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The command's name may contain spaces and brackets: fields are counted after the last bracket (proc(5)).
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
    """Tags that name this process."""
    return {"host": host(), "pid": str(os.getpid()), "pid_start": process_start(os.getpid()) or ""}


def alive(tags: dict[str, str]) -> bool:
    """Whether the process that wrote these tags on this host still runs."""
    start = process_start(int(tags["pid"]))
    return start is not None and start == tags.get("pid_start", start)


@contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) within, so that runs are closed on the way out; the handler is put back after.

    Raising instead of writing from the handler: the signal may have arrived inside a database transaction.
    """

    def leave(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)  # a second signal means now
        raise SystemExit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: it is not ours to handle
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
