"""stdout and stderr as lines of JSON (`log=json`): results on stdout, all other output on stderr, one object per line.

Output of libraries and child processes also becomes JSON lines: both descriptors of this process are pipes that threads read.
"""

import fcntl
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

from stages.core.redaction import nobody_reads, printable, redact_text

RESULT = "result"
"""Key with the kind of a result. Lines without this key are events."""
PIPE_BYTES = 1 << 20
"""Capacity of a pipe: bytes that a library can print while it blocks the thread."""
LAST_LINES_S = 1.0
"""Maximum seconds to wait for the last lines, because a child that still runs keeps its end of a pipe open."""


def line(fields: Mapping[str, object]) -> str:
    """Return an object as a line of JSON, with the time first and secrets masked."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return redact_text(json.dumps({"time": now, **fields}, ensure_ascii=False, default=str)) + "\n"


class Streams:
    """Redirects stdout and stderr, and writes JSON to the real ones."""

    def __init__(self) -> None:
        self._real = {stream: os.dup(stream) for stream in (1, 2)}
        self._threads = [threading.Thread(target=self._pass_on, args=(_piped(stream),), daemon=True) for stream in (1, 2)]
        for thread in self._threads:
            thread.start()

    def write(self, text: str, *, result: bool) -> None:
        """Write a line to the real stdout (a result) or stderr."""
        content, descriptor = text.encode("utf-8", errors="replace"), self._real[1 if result else 2]
        while content:
            try:
                content = content[os.write(descriptor, content) :]
            except OSError:  # the reader has exited, or the disk is full
                nobody_reads(descriptor)

    def close(self) -> None:
        """Restore the streams after passing on all printed lines."""
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, real in self._real.items():
            os.dup2(real, stream)
        for thread in self._threads:
            thread.join(LAST_LINES_S)

    def _pass_on(self, reads: int) -> None:
        """Pass on lines: JSON lines of kvgate's jobs unchanged, other lines as messages."""
        with open(reads, encoding="utf-8", errors="replace") as lines:
            for text in filter(None, map(str.rstrip, lines)):
                fields: object = None
                with suppress(ValueError):
                    fields = json.loads(text)
                keys = fields.keys() if isinstance(fields, dict) else set[str]()
                ours = "time" in keys and bool({RESULT, "level"} & keys)
                message = text + "\n" if ours else line({"level": "info", "message": printable(text), "source": "library"})
                with suppress(OSError):  # without a reader, printing must not block
                    self.write(message, result=ours and RESULT in keys)


def _piped(stream: int) -> int:
    """Replace a descriptor by a pipe and return the pipe's read end."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.dup2(writes, stream)
    os.close(writes)
    return reads
