"""Locks between processes (flock). A wait has a limit, and says after a second what it is for, who holds the lock, until when.

The system lets go of a lock when its process dies, however it dies.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import MissingRequirement, UserError

LOGGER = logging.getLogger("kvgate.waits")

LIMIT = "KVGATE_LOCK_TIMEOUT_S"
"""Environment variable with the most seconds that a lock is waited for."""
LIMIT_S = 6 * 3600
"""Its default: another process may be making the artifact that is waited for."""
QUIET_S = 1.0
POLL_S = 0.05
"""Seconds between two attempts: flock(2) has no wait with a limit."""


def limit_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return the most seconds that a lock is waited for. Raises UserError for a variable that is no number above zero."""
    text = environ.get(LIMIT, str(LIMIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise UserError(f"{LIMIT}={text}: give seconds above zero")
    return seconds


def until(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


@contextmanager
def locked(path: Path, purpose: str, *, together: bool = False) -> Iterator[None]:
    """Hold a lock while the block runs.

    `purpose` is what it is held for, in words; `together` lets others hold it so at the same time. Raises UserError where the
    file cannot be made, opened or locked; MissingRequirement where another process held it for all of KVGATE_LOCK_TIMEOUT_S.
    """
    seconds, began, said = limit_s(), time.monotonic(), False
    end = until(seconds)
    try:
        lock = _opened(path)
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        while not _flocked(path, lock, fcntl.LOCK_SH if together else fcntl.LOCK_EX):
            waited = time.monotonic() - began
            if waited > seconds:
                raise MissingRequirement(
                    f"{LIMIT}={seconds:g}: {purpose}: {holder(path)} held {path} all that time; end it, or give it longer"
                )
            if waited > QUIET_S and not said:
                LOGGER.warning(f"waiting for {purpose}: {holder(path)} holds {path}; until {end} ({LIMIT}={seconds:g})")
                said = True
            time.sleep(POLL_S)
        yield
    finally:
        os.close(lock)


@contextmanager
def locked_at_once(path: Path) -> Iterator[bool]:
    """Hold a lock alone while the block runs, if nobody else holds it: the block gets whether it does."""
    try:
        lock = _opened(path)
    except OSError:
        yield False
        return
    try:
        yield _flocked(path, lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # of another user, who may let this one read: enough to lock it
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _flocked(path: Path, lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # of a network's file system without locks
        raise _unlockable(path, error) from error
    return True


def _unlockable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be locked ({error.strerror}); it must be in a folder that has locks and lets you write")


def holder(path: Path) -> str:
    """Return who holds a lock, in words, as far as this system tells: `process 123`. Those of other machines are not seen."""
    try:
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
        # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END (proc(5)); waiting ones have an arrow before FLOCK
        pid = next(int(fields[4]) for fields in locks if fields[1] == "FLOCK" and fields[5] == place)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError, StopIteration):
        return "another process"
    return f"process {pid}, which is stopped (kill -CONT {pid} lets it go on)," if state in "Tt" else f"process {pid}"
