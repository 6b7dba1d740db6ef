"""Locks between processes, by filelock (flock). A wait has a time limit, and is logged with its purpose after a second.

The system releases a lock when its process dies, however it dies.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from stages.core.errors import MissingRequirement, UserError

LOGGER = logging.getLogger("kvgate.waits")

LIMIT = "KVGATE_LOCK_TIMEOUT_S"
"""Environment variable with the maximum seconds to wait for a lock."""
LIMIT_S = 6 * 3600
"""Default of the limit, in seconds; another process may take hours to make an artifact."""
QUIET_S = 1.0


def limit_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return the maximum seconds to wait for a lock. Raises UserError if the variable is not a number above zero."""
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
def locked(path: Path, purpose: str) -> Iterator[None]:
    """Hold a lock while the block runs. `purpose` explains a wait to the user.

    Raises UserError if the file cannot be made or locked; MissingRequirement if another process held the lock for all of
    KVGATE_LOCK_TIMEOUT_S.
    """
    seconds = limit_s()
    quiet = min(QUIET_S, seconds)
    lock = _lock(path)
    try:
        if not _acquired(lock, quiet):
            end = until(seconds - quiet)
            LOGGER.warning(f"waiting for {purpose}: another process holds {path}; until {end} ({LIMIT}={seconds:g})")
            if not _acquired(lock, seconds - quiet):
                raise MissingRequirement(
                    f"{LIMIT}={seconds:g}: {purpose}: another process held {path} all that time; find it with `fuser {path}` "
                    "and end it, or give it longer"
                )
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_at_once(path: Path) -> Iterator[bool]:
    """Hold a lock while the block runs, if it is free. Yields whether the lock was acquired.

    The lock is not acquired if another process holds it or the file cannot be opened. Raises UserError if the file system has
    no locks.
    """
    lock = _lock(path)
    try:
        acquired = _acquired(lock, 0)
    except (PermissionError, FileNotFoundError):
        acquired = False
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        yield acquired
    finally:
        lock.release()


def _lock(path: Path) -> FileLock:
    """Return a lock that other users may also hold: in a shared work directory the umask would exclude them."""
    return FileLock(path, mode=0o666, fallback_to_soft=False)


def _acquired(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    return True


def _unlockable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be locked ({error.strerror}); it must be in a folder that has locks and lets you write")
