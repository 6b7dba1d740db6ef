"""Ctrl-C while samples run: the first lets those in flight finish, the second stops at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether the user asked for an end."""

    requested = False


@contextmanager
def interruption() -> Iterator[Interruption]:
    """While the block runs, let the first SIGINT or SIGTERM only be noted; the second raises KeyboardInterrupt as usual.

    A signal that does not raise KeyboardInterrupt before (a background job ignores SIGINT, a library's user has SIGTERM end the
    process) stays as it is, and in a thread all do.
    """
    noted = Interruption()
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        raising = []

    def restore() -> None:
        for number in raising:
            signal.signal(number, signal.default_int_handler)

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.requested = True
        restore()

    for number in raising:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
