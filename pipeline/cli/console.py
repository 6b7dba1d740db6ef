"""Output of a command: results on stdout, errors and progress on stderr, in the format given by `log=`."""

import atexit
import io
import logging
import os
import re
import sys
import threading
import traceback
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
from stages.core.files import write_whole
from stages.core.redaction import printable, redact_text

if TYPE_CHECKING:
    from pipeline.cli.grids import Grid
    from stages.core.records import Progress

MODES = ("human", "json", "quiet")
"""Values of `log=`."""
PLAIN_WIDTH = 100
"""Columns of tables if the output is not a terminal."""

LOGGER = logging.getLogger("kvgate")
"""Logger of modules that do not import this one, such as waits for locks and stores."""

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
    def name(self) -> str:
        """Prefix of the job's lines, `job 2 of 5 int8: `; empty if it is the only job."""
        return f"{self.place[:-2]} {self.policy}: " if self.of > 1 else ""

    @property
    def place(self) -> str:
        """`job 2 of 5: `; empty if it is the only job."""
        return f"job {self.number} of {self.of}: " if self.of > 1 else ""

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the job in a JSON line."""
        return {"stage": self.stage, "policy": self.policy, "job": self.number, "jobs": self.of}


@dataclass
class _Speech:
    """The output format and the job of this process."""

    mode: str = "human"
    verbose: bool = False
    """Whether details are shown to people."""
    job: RunningJob | None = None
    streams: Streams | None = None
    """The process's stdout and stderr with `log=json`."""
    report: Console | None = None
    """Console that records a report with `log=json`."""

    @property
    def name(self) -> str:
        return printable(self.job.name) if self.job is not None else ""

    @property
    def target(self) -> Console | None:
        """Console for people; None if the output has no text for people."""
        return self.report if self.mode == "json" else out


_speech = _Speech()
_showing = threading.Lock()


def begin(job: RunningJob, about: str | None) -> None:
    """Announce a job. `about`: description for people; None announces it in JSON only."""
    _speech.job = job
    text = f"{job.place}{job.stage} {job.policy}{about or ''}"
    if _speech.mode == "json":
        _write({"message": text})
    elif _speech.mode == "human" and about is not None:
        out.print(relative(text), style="bold", soft_wrap=True, markup=False)


def end() -> None:
    """End the job: later lines do not name it."""
    _speech.job = None


def speak(mode: str) -> None:
    """Set the output format of this module. Prints of other modules do not change."""
    _speech.mode = mode


def configure(mode: str, *, verbose: bool = False) -> None:
    """Set the format of all output. With `json`, prints of libraries and child processes become JSON lines too.

    Args:
        mode: Value of `log=`.
        verbose: Whether to show details to people. JSON always has them.
    """
    speak(mode)
    _speech.verbose = verbose
    handler = _Handler()
    LOGGER.handlers, LOGGER.propagate = [handler], False
    LOGGER.setLevel(logging.ERROR if mode == "quiet" else logging.INFO)
    if mode == "quiet":
        warnings.simplefilter("ignore")
    if mode == "json" and _speech.streams is None:
        _speech.streams = Streams()
        atexit.register(close)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(handler)


def close() -> None:
    """Undo what `configure` did to the process."""
    if _speech.streams is not None:
        _speech.streams.close()
        _speech.streams = None
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").handlers = []
    LOGGER.handlers, LOGGER.propagate = [], True
    _speech.mode, _speech.verbose, _speech.job = "human", False, None


class _Handler(logging.Handler):
    """Writes the log records of other modules and Python's warnings in the format of `log=`."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        _aside(" ".join(text.split()), f"pipeline: {text}", level=record.levelname.lower())


def _write(fields: Mapping[str, object]) -> None:
    """Write a JSON object with the job's fields. The default level is info."""
    first = {RESULT: fields[RESULT]} if RESULT in fields else {"level": "info"}
    whole = {**first, **(_speech.job.fields if _speech.job is not None else {}), **fields}
    if _speech.streams is not None:
        _speech.streams.write(whole)
    else:
        print(line(whole), end="", file=sys.stderr, flush=True)


def _aside(message: str, human: str, **fields: object) -> None:
    """Write a JSON object, or print a line on stderr, above the bar if one is drawn."""
    if _speech.mode == "json":
        _write({"message": message, **fields})
    else:
        err.print(relative(human), soft_wrap=True, markup=False)


def result(kind: str, *lines: str, paste: bool = False, detail: bool = False, **fields: object) -> None:
    """Print lines for people, or write a JSON object.

    Args:
        kind: Name of the object.
        lines: Text for people, with markup.
        paste: Whether users copy the lines (commands, addresses). Other lines are wrapped between words on terminals.
        detail: Whether to show the lines to people only with `verbose=true`.
        fields: Content of the object.
    """
    if _speech.mode == "json":
        _write({RESULT: kind, **fields})
    target = _speech.target
    if target is None or (detail and not _speech.verbose):
        return
    for text in map(relative, lines):
        target.print(text, soft_wrap=paste or not target.is_terminal)


def say(text: str, *, paste: bool = False, detail: bool = False) -> None:
    """Print a line for people, or write a result of kind `text`. Arguments: see `result`."""
    if text.strip() or _speech.mode != "json":
        result("text", text, paste=paste, detail=detail, message=Text.from_markup(text.strip()).plain)


def show(kind: str, grid: "Grid") -> None:
    """Print a table, or write its rows as a JSON object."""
    if _speech.mode == "json":
        _write({RESULT: kind, "title": grid.title, "rows": grid.records()})
    target = _speech.target
    if target is not None:
        target.print(grid.table(target.width), crop=False)


def step(title: str, path: Path, seconds: float | None) -> None:
    """Report an artifact. `seconds`: how long it took; None if it was reused."""
    if _speech.mode == "json":
        _write({"message": f"{title} is ready", "step": title, "artifact": path, "seconds": seconds, "reused": seconds is None})
    elif _speech.mode == "human":
        took = "reused" if seconds is None else f"{seconds:.1f} s"
        whose = _speech.name if _speech.job is not None and _speech.job.beside_others else ""
        out.print(relative(f"  {whose}{title:<24} {took:>8}  {path}"), soft_wrap=True, markup=False)


def warning(text: str) -> None:
    """Print a warning."""
    _aside(text, f"pipeline: warning: {text}", level="warning")


def error(text: str, **fields: object) -> None:
    """Print the error that ended a job, in one line."""
    _aside(printable(text), f"pipeline: error: {_speech.name}{printable(text)}", level="error", **fields)


def ended_by(problem: Exception) -> None:
    """Print the errors that ended a job. If KVGATE_DEBUG is 1, also print the traceback of an unexpected exception."""
    for text in describe(problem).splitlines():
        error(text, exit_code=exit_code(problem))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, REFUSALS):
        trace = redact_text("".join(traceback.format_exception(problem)))
        _aside("where it came from", trace, level="error", traceback=trace)


def interrupted(text: str) -> None:
    """Print an interruption. `text` describes the state that it leaves."""
    _aside(f"interrupted; {text}", f"pipeline: interrupted; {text}", level="error", exit_code=INTERRUPTED)


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
def written_to(path: Path) -> Iterator[None]:
    """Also write the block's output for people to a text file, without colours. If the block fails, write no file."""
    report = out if _speech.mode != "json" else Console(file=io.StringIO(), highlight=False, width=PLAIN_WIDTH)
    _speech.report, report.record = report, True
    try:
        yield
    finally:
        text = report.export_text()  # also clears the recording
        _speech.report, report.record = None, False
    write_whole(path, redact_text(text))


@contextmanager
def progress(title: str) -> "Iterator[Progress]":
    """Show the progress of the block on stderr.

    A terminal gets a bar. Other outputs get lines at regular intervals, even without progress. Messages are printed at once.
    For nested calls, only the outer block shows progress.

    Args:
        title: Description of the work.

    Yields:
        A function (label, done units, total units) for the block to call. A total of 0 marks a message.
    """
    from pipeline.cli import progress as shown

    def say(message: str, **fields: Any) -> None:
        if _speech.mode != "quiet":
            _aside(f"{title}: {message}", f"  {_speech.name}{title}: {message}", step=title, **fields)

    if _showing.locked():
        yield lambda label, _, total: None if total else say(label)
        return
    job = _speech.job
    drawn = _speech.mode == "human" and err.is_terminal and not (job is not None and job.beside_others)
    phases = shown.Phases(f"{job.place if job is not None else ''}{title}", err if drawn else None)

    def update(label: str, done: int, total: int) -> None:
        if total:
            phases.update(label, done, total)
        else:
            say(label)

    lines = shown.repeated(lambda: say(shown.describe(phases.task), **shown.fields(phases.task)))
    with _showing, phases.bars if drawn else lines:
        yield update


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show a description of the block's work if the block takes more than a moment."""
    with progress(what):
        yield
