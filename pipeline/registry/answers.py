"""Answers of a tracking server end: each has a limit of time and of bytes, as every answer of a server has.

The client's own timeout is one between two readings, so that a byte now and then is waited for for ever.
"""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection

MOST_BYTES = 256 << 20
"""Of an answer to a question; thousands of versions with their tags have fewer."""
MOST_FILE_BYTES = 1 << 42
SLOWEST_BYTES_S = 256 << 10
"""Of a file's download, which may take longer than an answer."""


_downloads: list[bool] = []
"""One for each download that goes on: its library reads in threads of its own."""


class _Limited(io.RawIOBase):
    """What a socket gives, until it was too long or too much."""

    def __init__(self, stream: Any, seconds: float) -> None:
        self._stream, self._until, self._read = stream, time.monotonic() + seconds, 0
        self._file = bool(_downloads)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._read += count
        if time.monotonic() > self._until + (self._read / SLOWEST_BYTES_S if self._file else 0):
            raise TimeoutError("timed out: the answer does not end")
        if self._read > (MOST_FILE_BYTES if self._file else MOST_BYTES):
            raise OSError(f"the answer has more than {MOST_BYTES:,} bytes")
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def limit_answers(seconds: float) -> None:
    """Give every answer that this process gets by urllib3 from now on so many seconds, from its first byte to its last."""

    class Ending(HTTPResponse):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.fp = io.BufferedReader(_Limited(self.fp.detach(), seconds))

    for kind in (HTTPConnection, HTTPSConnection):
        kind.response_class = Ending


@contextmanager
def files_downloaded() -> Iterator[None]:
    """Take files while the block runs: larger than answers, and for longer, as long as they keep coming."""
    _downloads.append(True)
    try:
        yield
    finally:
        _downloads.pop()
