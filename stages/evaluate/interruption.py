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
    """While the block runs, let the first SIGINT only be noted; the second raises KeyboardInterrupt as usual.

    Where SIGINT is not Python's own (a background job ignores it), or in a thread, nothing changes.
    """
    noted = Interruption()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.requested = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
