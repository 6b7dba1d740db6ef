"""Locks between processes, by filelock (flock). A wait is logged with its purpose after a second.

The system releases a lock when its process dies, however it dies.
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from filelock import FileLock, Timeout

from stages.core.errors import MissingRequirement, UserError

LOGGER = logging.getLogger("kvgate.waits")
LIMIT_S = 6 * 3600.0
"""Maximum seconds to wait for a lock; another process may take hours to make an artifact."""
QUIET_S = 1.0


@contextmanager
def announced(message: str, quiet_s: float) -> Iterator[None]:
    """Log a message if the block takes longer than `quiet_s`."""
    timer = Timer(quiet_s, LOGGER.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def locked(path: Path, purpose: str) -> Iterator[None]:
    """Hold a lock while the block runs. `purpose` explains a wait to the user.

    Raises UserError if the file cannot be made or locked; MissingRequirement if another process held the lock for LIMIT_S.
    """
    lock = _lock(path)
    try:
        with announced(f"waiting for {purpose}: another process holds {path}; at most {LIMIT_S / 3600:g} hours", QUIET_S):
            lock.acquire(timeout=LIMIT_S)
    except Timeout:
        raise MissingRequirement(
            f"{purpose}: another process held {path} for {LIMIT_S / 3600:g} hours; find it with `fuser {path}` and end it"
        ) from None
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_at_once(path: Path) -> Iterator[bool]:
    """Hold a lock while the block runs, if it is free. Yields whether the lock was acquired.

    False if another process holds it or the file cannot be opened. Raises UserError if the file system has no locks.
    """
    lock = _lock(path)
    acquired = True
    try:
        lock.acquire(timeout=0)
    except (Timeout, PermissionError, FileNotFoundError):
        acquired = False
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        yield acquired
    finally:
        lock.release()


@contextmanager
def shared(path: Path, purpose: str) -> Iterator[None]:
    """Hold a lock together with other processes while the block runs. Waits without a limit while a process holds it alone."""
    with locked_at_once(path):  # makes the file, so that other users may open it
        pass
    with path.open("rb") as file:
        with announced(f"waiting for {purpose}: another process holds {path}", QUIET_S):
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _lock(path: Path) -> FileLock:
    """Return a lock that other users may also hold: the umask would exclude them from a shared work directory."""
    return FileLock(path, mode=0o666, fallback_to_soft=False)


def _unlockable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be locked ({error.strerror}); it must be in a folder that has locks and lets you write")
