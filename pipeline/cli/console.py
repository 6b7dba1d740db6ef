"""Output of a command: results on stdout; progress, warnings and errors on stderr, in the format given by `log=`."""

import atexit
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pipeline.cli.streams import RESULT, Streams, line
from stages.core.errors import DEBUG_VARIABLE, INTERRUPTED, REFUSALS, describe, exit_code
from stages.core.redaction import printable, redact_text

if TYPE_CHECKING:
    from pipeline.cli.grids import Grid
    from stages.core.records import Progress

MODES = ("human", "verbose", "json", "quiet")
"""Values of `log=`."""
PLAIN_WIDTH = 100
"""Columns of tables if the output is not a terminal."""
PREFIXES = {logging.WARNING: "pipeline: warning: ", logging.ERROR: "pipeline: error: "}
"""Level -> beginning of a line for people."""

_wide = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ  # None: it was closed
out = Console(highlight=False, emoji=False, width=None if _wide else PLAIN_WIDTH)
err = Console(highlight=False, emoji=False, stderr=True)


def relative(text: str) -> str:
    """Return a text with paths below the current directory made relative. Among addresses, only SQLite's are changed."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return text
    if here == "/":
        return text
    return re.sub(rf"(?:(?<=sqlite:///)|(?<![\w./:~-])){re.escape(here)}/(?=[^\s/])", "", text)


@dataclass(frozen=True)
class RunningJob:
    """The job of this process."""

    stage: str
    policy: str
    number: int = 1
    of: int = 1
    """Number of jobs of the command."""
    beside_others: bool = False
    """Whether concurrent jobs share a terminal. A bar would overwrite the lines of other jobs."""

    @property
    def place(self) -> str:
        """`job 2 of 5: `; empty if it is the only job."""
        return f"job {self.number} of {self.of}: " if self.of > 1 else ""

    @property
    def name(self) -> str:
        """Prefix of the job's lines, `job 2 of 5 int8: `; empty if it is the only job."""
        return printable(f"{self.place[:-2]} {self.policy}: ") if self.of > 1 else ""

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the job in a JSON line."""
        return {"stage": self.stage, "policy": self.policy, "job": self.number, "jobs": self.of}


@dataclass
class _Speech:
    """The output format and the job of this process."""

    mode: str = "human"
    job: RunningJob | None = None
    streams: Streams | None = None
    """The process's stdout and stderr with `log=json`."""

    def write(self, fields: Mapping[str, object]) -> None:
        """Write a JSON object with the job's fields: a result to stdout, other objects to stderr."""
        first = {RESULT: fields[RESULT]} if RESULT in fields else {}
        text = line({**first, **(self.job.fields if self.job is not None else {}), **fields})
        if self.streams is not None:
            self.streams.write(text, result=RESULT in fields)
        else:
            print(text, end="", file=sys.stderr, flush=True)


_speech = _Speech()
_showing = threading.Lock()


class _Handler(logging.Handler):
    """Writes log records to stderr: lines for people, or JSON objects with the record's `fields`."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info:
            fields = {"traceback": redact_text(logging.Formatter().formatException(record.exc_info))}
        if _speech.mode == "json":
            _speech.write({"level": record.levelname.lower(), "message": " ".join(text.split()), **fields})
            return
        prefix = PREFIXES.get(record.levelno, "  " if "step" in fields else "")
        name = _speech.job.name if _speech.job is not None else ""
        err.print(relative(str(fields.get("traceback", f"{prefix}{name}{text}"))), soft_wrap=True, markup=False)


LOGGER = logging.getLogger("kvgate")
"""Logger of all events. Modules that do not import this one, such as waits for locks and stores, log below its name."""
LOGGER.addHandler(_Handler())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def speak(mode: str) -> None:
    """Set the output format of this module. Prints of other modules do not change."""
    _speech.mode = mode
    LOGGER.setLevel(logging.WARNING if mode == "quiet" else logging.INFO)


def configure(mode: str) -> None:
    """Set the format of all output. With `json`, prints of libraries and child processes become JSON lines too."""
    speak(mode)
    if mode == "quiet":
        warnings.simplefilter("ignore")
    if mode == "json" and _speech.streams is None:
        _speech.streams = Streams()
        atexit.register(close)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").handlers = LOGGER.handlers


def close() -> None:
    """Undo what `configure` did to the process."""
    if _speech.streams is not None:
        _speech.streams.close()
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").handlers = []
    _speech.streams, _speech.job = None, None
    speak("human")


def begin(job: RunningJob, model: str | None = None) -> None:
    """Start a job, and announce it if it works on a model."""
    end()
    if model is not None:
        _event(logging.INFO, f"{job.place}{job.stage} {job.policy} of {model}", **job.fields)
    _speech.job = job


def end() -> None:
    """End the job: later lines do not name it."""
    _speech.job = None


def result(kind: str, *lines: str, paste: bool = False, detail: bool = False, **fields: object) -> None:
    """Print lines for people, or write a JSON object.

    Args:
        kind: Name of the object.
        lines: Text for people, with markup.
        paste: Whether users copy the lines (commands, addresses). Other lines are wrapped between words on terminals.
        detail: Whether to show the lines to people only with `log=verbose`. JSON always has their fields.
        fields: Content of the object.
    """
    if _speech.mode == "json":
        _speech.write({RESULT: kind, **fields})
    elif _speech.mode == "verbose" or not detail:
        for text in map(relative, lines):
            out.print(text, soft_wrap=paste or not out.is_terminal)


def say(text: str, *, paste: bool = False, detail: bool = False) -> None:
    """Print a line for people, or write a result of kind `text`. Arguments: see `result`."""
    if text.strip() or _speech.mode != "json":
        result("text", text, paste=paste, detail=detail, message=Text.from_markup(text.strip()).plain)


def show(kind: str, grid: "Grid") -> None:
    """Print a table, or write its rows as a JSON object."""
    if _speech.mode == "json":
        _speech.write({RESULT: kind, "title": grid.title, "rows": grid.records()})
    else:
        out.print(grid.table(out.width), crop=False)


def _event(level: int, text: str, **fields: object) -> None:
    LOGGER.log(level, "%s", text, extra={"fields": fields})


def step(title: str, path: Path, seconds: float | None) -> None:
    """Report an artifact. `seconds`: how long it took; None if it was reused."""
    took = "reused" if seconds is None else f"{seconds:.1f} s"
    known = {"step": title, "artifact": path, "seconds": seconds, "reused": seconds is None}
    _event(logging.INFO, f"{title:<24} {took:>8}  {path}", **known)


def warning(text: str) -> None:
    _event(logging.WARNING, text)


def error(text: str, **fields: object) -> None:
    """Print the error that ended a job, in one line."""
    _event(logging.ERROR, printable(text), **fields)


def ended_by(problem: Exception) -> None:
    """Print the errors that ended a job. If KVGATE_DEBUG is 1, also print the traceback of an unexpected exception."""
    for text in describe(problem).splitlines():
        error(text, exit_code=exit_code(problem))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, REFUSALS):
        LOGGER.error("where it came from", exc_info=problem)


def interrupted(text: str) -> None:
    """Print an interruption. `text` describes the state that it leaves."""
    end()
    error(f"interrupted; {text}", exit_code=INTERRUPTED)


@contextmanager
def silent() -> Iterator[None]:
    """Print neither results nor progress while the block runs."""
    before = out.quiet, err.quiet
    out.quiet = err.quiet = True
    try:
        yield
    finally:
        out.quiet, err.quiet = before


@contextmanager
def progress(title: str) -> "Iterator[Progress]":
    """Show the progress of the block on stderr: a bar on a terminal, else lines at regular intervals, even without progress.

    Messages are printed at once. For nested calls, only the outer block shows progress.

    Yields:
        A function (label, done units, total units) for the block to call. A total of 0 marks a message.
    """
    from pipeline.cli.progress import Phases, describe, repeated

    def said(message: str, fields: Mapping[str, Any]) -> None:
        _event(logging.INFO, f"{title}: {message}", step=title, **fields)

    if _showing.locked():
        yield lambda label, _, total: None if total else said(label, {})
        return
    job = _speech.job
    drawn = _speech.mode in ("human", "verbose") and err.is_terminal and not (job is not None and job.beside_others)
    phases = Phases(f"{job.place if job is not None else ''}{title}", err if drawn else None)
    lines = repeated(lambda: said(*describe(phases.task)))
    with _showing, phases.bars if drawn else lines:
        yield lambda label, done, total: phases.update(label, done, total) if total else said(label, {})


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show a description of the block's work if the block takes more than a moment."""
    with progress(what):
        yield
