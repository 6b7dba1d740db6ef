"""Waits for locks are limited, and their messages name the limit and the holder."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.store import locks
from pipeline.store.locks import LIMIT, locked, locked_at_once
from stages.core.errors import MissingRequirement, UserError

REFUSAL = r"cannot be locked \(.*\); it must be in a folder that has locks and lets you write"
FORK = multiprocessing.get_context("fork")


def _hold(path: Path, ready: Connection) -> None:
    with locked(path, "a test"):
        ready.send("held")
        signal.pause()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A lock held by another process, and that process's id."""
    path = tmp_path / ".lock"
    parent, child = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(path, child), daemon=True)
    process.start()
    assert parent.recv() == "held"
    assert process.pid is not None
    yield path, process.pid
    process.kill()
    process.join()


def test_a_wait_says_what_it_is_for_and_ends_with_its_limit(
    held: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = held
    monkeypatch.setattr(locks, "QUIET_S", 0.05)
    monkeypatch.setenv(LIMIT, "0.2")
    said = rf"KVGATE_LOCK_TIMEOUT_S=0\.2: registering: another process held {path} all that time; find it with `fuser {path}`"
    with pytest.raises(MissingRequirement, match=said), locked(path, "registering"):
        pass
    assert caplog.messages[0].startswith(f"waiting for registering: another process holds {path}; until ")
    assert "(KVGATE_LOCK_TIMEOUT_S=0.2)" in caplog.messages[0]


def test_a_lock_of_a_process_that_was_killed_is_free(held: tuple[Path, int]) -> None:
    path, pid = held
    with locked_at_once(path) as mine:
        assert not mine
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with locked_at_once(path) as mine:
        assert mine


def test_another_user_of_a_shared_folder_may_hold_a_lock(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with locked(tmp_path / ".lock", "a test"):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.parametrize("place", ["file/.lock", "folder"])
def test_a_place_in_which_no_lock_can_be_made_is_refused_and_not_waited_for(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path / place}: {REFUSAL}"), locked(tmp_path / place, "summary.json"):
        pass


@pytest.mark.parametrize("take", [lambda path: locked(path, "summary.json"), locked_at_once])
def test_a_file_system_without_locks_is_refused(
    take: Callable[[Path], AbstractContextManager[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=rf"{tmp_path}/\.lock: {REFUSAL}"), take(tmp_path / ".lock"):
        pass


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, text)
    with (
        pytest.raises(UserError, match=f"KVGATE_LOCK_TIMEOUT_S={text}: give seconds above zero"),
        locked(tmp_path / "l", "a test"),
    ):
        pass
