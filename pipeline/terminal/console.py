"""What a command says: results on stdout, errors and progress on stderr, in the form that `log=` asks for."""

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
from rich.padding import Padding
from rich.text import Text

from pipeline.artifacts.files import write_whole
from pipeline.core.errors import DEBUG_VARIABLE, INTERRUPTED, REFUSALS, describe, exit_code
from pipeline.core.redaction import printable, redact_text
from pipeline.terminal.streams import RESULT, Streams, line

if TYPE_CHECKING:
    from pipeline.core.records import Progress
    from pipeline.terminal.grids import Grid

MODES = ("human", "json", "quiet")
"""`log=`."""
PLAIN_WIDTH = 100
"""Columns where nobody sets a width: tables need one."""

LOGGER = logging.getLogger("kvgate")
"""What rooms say that know nothing of terminals: waits for locks and stores."""

_wide = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ  # None: it was closed
out = Console(highlight=False, emoji=False, width=None if _wide else PLAIN_WIDTH)
err = Console(highlight=False, emoji=False, stderr=True)


def relative(text: str) -> str:
    """Return a text with the paths below the current directory relative to it; in addresses, those of SQLite alone."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return text
    if here == "/":
        return text
    return re.sub(rf"(?:(?<=sqlite:///)|(?<![\w./:~-])){re.escape(here)}/(?=[^\s/])", "", text)


@dataclass(frozen=True)
class Job:
    """What a process is at work on."""

    stage: str
    policy: str
    number: int = 1
    of: int = 1
    """Jobs of the command."""
    beside_others: bool = False
    """Whether they run at once, and write to one terminal: a bar would be drawn over other jobs' lines."""

    @property
    def name(self) -> str:
        """Return what its lines begin with, `job 2 of 5 int8: `; nothing where a command has one job."""
        return f"{self.place[:-2]} {self.policy}: " if self.of > 1 else ""

    @property
    def place(self) -> str:
        """Return `job 2 of 5: `; nothing where a command has one job."""
        return f"job {self.number} of {self.of}: " if self.of > 1 else ""

    @property
    def fields(self) -> dict[str, object]:
        """Return what lines of JSON say of it."""
        return {"stage": self.stage, "policy": self.policy, "job": self.number, "jobs": self.of}


@dataclass
class _Speech:
    """How this process speaks, and of which job."""

    mode: str = "human"
    verbose: bool = False
    """Whether people are shown details as well."""
    job: Job | None = None
    streams: Streams | None = None
    """Both of the process's streams, under `json`."""
    report: Console | None = None
    """Gets what is written into a file, under `json`."""

    @property
    def name(self) -> str:
        return printable(self.job.name) if self.job is not None else ""

    @property
    def target(self) -> Console | None:
        """What people read from; None where nobody does."""
        return self.report if self.mode == "json" else out


_speech = _Speech()
_showing = threading.Lock()


def begin(job: Job, about: str | None) -> None:
    """Say which job begins; `about` is what it is about, for people: nothing is said to them where it is None."""
    _speech.job = job
    text = f"{job.place}{job.stage} {job.policy}{about or ''}"
    if _speech.mode == "json":
        _write({"message": text})
    elif _speech.mode == "human" and about is not None:
        out.print(relative(text), style="bold", soft_wrap=True, markup=False)


def end() -> None:
    """The job has ended: what is said from now on is not of it."""
    _speech.job = None


def speak(mode: str) -> None:
    """Speak in this form from now on, as far as this module is asked; what others print stays as it is."""
    _speech.mode = mode


def configure(mode: str, *, verbose: bool = False) -> None:
    """Speak in this form from now on; under `json` nothing else leaves this process on its streams.

    Args:
        mode: `log=`.
        verbose: Whether people are shown details as well; a log collector gets them in any case.
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
    """Shows what rooms log that know nothing of terminals, and Python's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        _aside(" ".join(text.split()), f"pipeline: {text}", level=record.levelname.lower())


def _write(fields: Mapping[str, object]) -> None:
    """Write an object: of this job, and an info unless it says otherwise."""
    first = {RESULT: fields[RESULT]} if RESULT in fields else {"level": "info"}
    whole = {**first, **(_speech.job.fields if _speech.job is not None else {}), **fields}
    if _speech.streams is not None:
        _speech.streams.write(whole)
    else:
        print(line(whole), end="", file=sys.stderr, flush=True)


def _aside(message: str, human: str, **fields: object) -> None:
    """Write an object, or print a line on stderr, above a bar where there is one."""
    if _speech.mode == "json":
        _write({"message": message, **fields})
    else:
        err.print(relative(human), soft_wrap=True, markup=False)


def result(kind: str, *lines: str, paste: bool = False, detail: bool = False, **fields: object) -> None:
    """Print lines for people, or write an object where a log collector reads.

    Args:
        kind: What the object is called.
        lines: What people are told, with markup.
        paste: Whether the lines are there to be copied: commands and addresses. A terminal wraps other lines between words, so
            that it cuts no number; where there is no terminal a line stays one.
        detail: Whether people see the lines under `verbose=true` alone.
        fields: What the object holds.
    """
    if _speech.mode == "json":
        _write({RESULT: kind, **fields})
    target = _speech.target
    if target is None or (detail and not _speech.verbose):
        return
    for text in map(relative, lines):
        if paste or not target.is_terminal:
            target.print(text, soft_wrap=True)
        else:
            indent = len(text) - len(text.lstrip(" "))
            target.print(Padding(text.lstrip(" "), (0, 0, 0, indent), expand=False))


def say(text: str, *, paste: bool = False, detail: bool = False) -> None:
    """Print a line for people, which is a result of the kind `text` for a log collector; the arguments are as of `result`."""
    if text.strip() or _speech.mode != "json":
        result("text", text, paste=paste, detail=detail, message=Text.from_markup(text.strip()).plain)


def show(kind: str, grid: "Grid") -> None:
    """Print a table, or write its rows as a result."""
    if _speech.mode == "json":
        _write({RESULT: kind, "title": grid.title, "rows": grid.records()})
    target = _speech.target
    if target is not None:
        target.print(grid.table(target.width), crop=False)


def step(title: str, path: Path, seconds: float | None) -> None:
    """Say that an artifact is there; `seconds` is what making it took, None for one that is reused."""
    if _speech.mode == "json":
        _write({"message": f"{title} is ready", "step": title, "artifact": path, "seconds": seconds, "reused": seconds is None})
    elif _speech.mode == "human":
        took = "reused" if seconds is None else f"{seconds:.1f} s"
        whose = _speech.name if _speech.job is not None and _speech.job.beside_others else ""
        out.print(relative(f"  {whose}{title:<24} {took:>8}  {path}"), soft_wrap=True, markup=False)


def warning(text: str) -> None:
    """Say what somebody should look at."""
    _aside(text, f"pipeline: warning: {text}", level="warning")


def error(text: str, **fields: object) -> None:
    """Say in one line what ended a job."""
    _aside(printable(text), f"pipeline: error: {_speech.name}{printable(text)}", level="error", **fields)


def ended_by(problem: Exception) -> None:
    """Say what ends a job. Anything but a refusal also shows where it came from, where the environment asks for it."""
    for text in describe(problem).splitlines():
        error(text, exit_code=exit_code(problem))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, REFUSALS):
        trace = redact_text("".join(traceback.format_exception(problem)))
        _aside("where it came from", trace, level="error", traceback=trace)


def interrupted(text: str) -> None:
    """Say what an interruption leaves."""
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
    """Write what the block prints for people into a text file as well, without colours; nothing where the block fails."""
    report = out if _speech.mode != "json" else Console(file=io.StringIO(), highlight=False, width=PLAIN_WIDTH)
    _speech.report, report.record = report, True
    try:
        yield
    finally:
        text = report.export_text()  # drops what was recorded, too
        _speech.report, report.record = None, False
    write_whole(path, redact_text(text))


@contextmanager
def progress(title: str) -> "Iterator[Progress]":
    """Show the progress of what the block does on stderr.

    A terminal gets a bar; anything else gets lines, whether or not anything moved. Messages are printed at once. A block within
    a block shows nothing of its own.

    Args:
        title: What is made or done.

    Returns:
        What the block calls with a label, the units that are done, and all of them; a message has none.
    """
    from pipeline.terminal import progress as shown

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
    """Say what is done in the block, where it takes more than a moment."""
    with progress(what):
        yield
