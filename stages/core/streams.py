"""The standard streams of a command: secrets are masked, stdout is for results, and a lost reader does not end the command."""

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast

from stages.core.redaction import redact_text


def program_name() -> str:
    """Return the name that begins messages: `kvgate` if the user ran this script, otherwise `pipeline`."""
    return "kvgate" if os.path.basename(sys.argv[0]) == "kvgate" else "pipeline"


def discard_output(descriptor: int) -> None:
    """Discard everything that is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_closed_streams() -> None:
    """Open the standard streams that the parent process had closed, so that later files do not get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            discard_output(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def reserve_stdout() -> None:
    """Keep stdout for results. Native code of libraries prints on descriptor 1, which becomes a copy of stderr."""
    results = sys.__stdout__
    if results is not None and sys.stdout is results:
        # like stderr, it escapes a path that its encoding lacks
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=results.encoding, errors="backslashreplace")
        os.dup2(2, 1)


class RedactedStream:
    """A text stream that masks secrets.

    If the stream fails (its reader, such as `head`, has exited, or the disk is full), later output is discarded, because the
    command's result decides its exit code, not its output. A full disk is reported on stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(redact_text(text))
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        discard_output(self._stream.fileno())
        if self is sys.stdout and not isinstance(error, BrokenPipeError):
            print(f"{program_name()}: warning: stdout: {error.strerror}; later output is lost", file=sys.stderr)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_output() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, RedactedStream):
            setattr(sys, name, cast(TextIO, RedactedStream(stream)))
