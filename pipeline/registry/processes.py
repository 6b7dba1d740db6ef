"""The process that a tracked run belongs to, and whether it still runs.

Where this system can see the process it is asked. A process of another machine or container is known by its lease: a tag with
a time, which it puts off as long as it lives.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

LEASE = "lease_until"
"""Tag with the time after which a run's process counts as dead, unless it puts the time off."""
LEASE_TIME = timedelta(minutes=15)
BEAT_S = 120.0
"""Seconds between two times that a lease is put off: clocks may differ by minutes, and a store may be away for some."""


def host() -> str:
    """Return this machine's name, for people."""
    return socket.gethostname()


def place() -> str:
    """Return what tells apart systems whose process numbers are not the same: a boot of a machine, and a container on it.

    Host names do not: every `docker run` has another, and two containers may be given the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return host()


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
    return {"host": host(), "place": place(), "pid": str(os.getpid()), "pid_start": process_start(os.getpid()) or ""}


def lease(now: datetime | None = None) -> dict[str, str]:
    """Return the tag that puts the lease off."""
    return {LEASE: ((now or datetime.now(UTC)) + LEASE_TIME).isoformat(timespec="seconds")}


@contextmanager
def leased(renew: Callable[[Mapping[str, str]], None]) -> Iterator[None]:
    """Put a lease off in the background while the block runs; `renew` writes the tag."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                renew(lease())
            except Exception:
                continue  # a store that is away for a while; the run's own calls report it

    thread = threading.Thread(target=beat, daemon=True, name="lease")
    thread.start()
    try:
        yield
    finally:
        ended.set()


def abandoned(tags: Mapping[str, str], now: datetime | None = None) -> bool:
    """Return whether the process that wrote these tags is dead. False where nothing tells: of runs that others made."""
    if "pid" not in tags or not tags["pid"].isdigit():
        return False
    if tags.get("place", tags.get("host")) in (place(), host()):  # runs of an older kvgate have no place
        start = process_start(int(tags["pid"]))
        return start is None or start != tags.get("pid_start", start)
    try:
        return datetime.fromisoformat(tags[LEASE]) < (now or datetime.now(UTC))
    except (KeyError, ValueError, TypeError):
        return False
