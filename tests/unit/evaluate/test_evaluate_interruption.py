"""Signals during an evaluation."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from stages.evaluate.decoding.rows import interruption


@pytest.fixture(autouse=True)
def _as_the_command_line() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops(first: signal.Signals, second: signal.Signals) -> None:
    def interrupted() -> None:
        with interruption() as noted:
            assert not noted.requested
            os.kill(os.getpid(), first)
            assert noted.requested
            os.kill(os.getpid(), second)
            pytest.fail("the second signal stops at once")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_a_signal_after_the_last_sample_ends_the_block_too() -> None:
    done = []

    def interrupted() -> None:
        with interruption():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["the rest"]


def test_a_signal_that_ends_the_process_elsewhere_keeps_doing_so() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with interruption():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_thread_leaves_signals_alone() -> None:
    seen: list[object] = []

    def run() -> None:
        with interruption():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
