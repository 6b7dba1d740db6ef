"""What a command says: results on stdout, errors and progress on stderr, in the form that `log=` asks for."""

import atexit
import io
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pipeline.artifacts.digest import told
from pipeline.core.errors import DEBUG_VARIABLE, INTERRUPTED, REFUSALS, describe, exit_code
from pipeline.core.redaction import printable, redact_text
from pipeline.terminal.grids import Grid, lay_out
from pipeline.terminal.phases import Phase, bar, duration, lines
from pipeline.terminal.streams import RESULT, Streams, line
from pipeline.terminal.texts import between_words, relative

if TYPE_CHECKING:
    from pipeline.core.records import Progress

MODES = ("human", "json", "quiet")
"""`log=`."""
PLAIN_WIDTH = 100
"""Columns where nobody sets a width: tables need one."""

LOGGER = logging.getLogger("kvgate")
"""What rooms say that know nothing of terminals: waits for locks and stores."""


class _Shown(Console):
    """A console that shows paths below the current directory relative to it; under `json` it writes results, of kind `text`."""

    def print(self, *objects: Any, **options: Any) -> None:
        if self is out and _speech.mode == "json":
            plain = Console(file=io.StringIO(), highlight=False, width=PLAIN_WIDTH, color_system=None)
            plain.print(*objects, **options)
            for text in plain.file.getvalue().splitlines():  # type: ignore[attr-defined]
                if text.strip():
                    result("text", message=text.strip())
        else:
            super().print(*(relative(one) if isinstance(one, str) else one for one in objects), **options)


out = _Shown(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH)
err = _Shown(highlight=False, stderr=True)


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
        return f"job {self.number} of {self.of} {self.policy}: " if self.of > 1 else ""

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
    """`log=`: `human`, `json` or `quiet`."""
    job: Job | None = None
    """What it is at work on."""
    begun: list[float] = field(default_factory=list)
    """When its jobs began, in seconds of the monotonic clock."""
    streams: Streams | None = None
    """Both of the process's streams, under `json`."""
    report: Console | None = None
    """Gets what is written into a file, under `json`."""


_speech = _Speech()
_showing = threading.Lock()


def begin(job: Job, about: str | None) -> None:
    """Say which job begins and, from the second one on, how long the rest will take at the pace of those before it.

    Args:
        job: The job.
        about: What it is about, for people; None: nothing is said to them.
    """
    _speech.job = job
    _speech.begun.append(time.monotonic())
    ended, took = len(_speech.begun) - 1, _speech.begun[-1] - _speech.begun[0]
    text, fields = f"{job.place}{job.stage} {job.policy}{about or ''}", {}
    if ended and ended == job.number - 1 and not job.beside_others:  # the jobs before it ran here, one after the other
        rest = took / ended * (job.of - ended)
        text += f"; {ended} done in {duration(took)}, about {duration(rest)} left"
        fields = {"jobs_done": ended, "jobs_seconds_left": round(rest, 1)}
    if _speech.mode == "json":
        _write({"message": text, **fields})
    elif _speech.mode == "human" and about is not None:
        out.print(text, style="bold", soft_wrap=True, markup=False)


def end() -> None:
    """The job has ended: what is said from now on is not of it."""
    _speech.job = None


def speak(mode: str) -> None:
    """Speak in this form from now on, as far as this module is asked; what others print stays as it is."""
    _speech.mode = mode


def configure(mode: str) -> None:
    """Speak in this form from now on; under `json` nothing else leaves this process on its streams."""
    speak(mode)
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
    _speech.mode, _speech.job = "human", None
    _speech.begun.clear()


class _Handler(logging.Handler):
    """Shows what rooms log that know nothing of terminals, and Python's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _speech.mode == "json":
            _write({"level": record.levelname.lower(), "message": " ".join(text.split())})
        else:
            err.print(f"pipeline: {text}", soft_wrap=True, markup=False)


def _write(fields: Mapping[str, object]) -> None:
    about = _speech.job.fields if _speech.job is not None else {}
    first = {RESULT: fields[RESULT]} if RESULT in fields else {"level": "info"}
    if _speech.streams is not None:
        _speech.streams.write(first | about | dict(fields))
    else:
        print(line(first | about | dict(fields)), end="", file=sys.stderr, flush=True)


def result(kind: str, *lines: str, paste: bool = False, **fields: object) -> None:
    """Print lines for people, or write an object where a log collector reads.

    Args:
        kind: What the object is called.
        lines: What people are told, with markup.
        paste: Whether the lines are there to be copied: commands and addresses. A terminal wraps other lines between words, so
            that it cuts no number; where there is no terminal a line stays one.
        fields: What the object holds.
    """
    if _speech.mode == "json":
        _write({RESULT: kind, **fields})
    target = _target()
    if target is None:
        return
    for text in lines:
        if paste or not target.is_terminal:
            target.print(text, soft_wrap=True)
        else:
            stripped = text.lstrip(" ")
            indent = " " * (len(text) - len(stripped))
            for part in between_words(Text.from_markup(relative(stripped)), target.width - len(indent)):
                target.print(Text(indent) + part, soft_wrap=True)


def say(text: str, *, paste: bool = False) -> None:
    """Print a line for people, which is a result of the kind `text` for a log collector; the arguments are as of `result`."""
    if _speech.mode == "json" and not text.strip():
        return
    result("text", text, paste=paste, message=Text.from_markup(text.strip()).plain)


def show(kind: str, grid: Grid) -> None:
    """Print a table, or write its rows as a result."""
    if _speech.mode == "json":
        _write({RESULT: kind, "title": grid.title, "rows": grid.records()})
    target = _target()
    if target is not None:
        for part in lay_out(grid, target.width):
            target.print(part, soft_wrap=isinstance(part, Text))


def _target() -> Console | None:
    """Return what people read from; None where nobody does."""
    return _speech.report if _speech.mode == "json" else out


def step(title: str, path: Path, seconds: float | None) -> None:
    """Say that an artifact is there; `seconds` is what making it took, None for one that is reused."""
    if _speech.mode == "json":
        _write({"message": f"{title} is ready", "step": title, "artifact": path, "seconds": seconds, "reused": seconds is None})
    elif _speech.mode == "human":
        took = "reused" if seconds is None else f"{seconds:.1f} s"
        whose = _speech.job.name if _speech.job is not None and _speech.job.beside_others else ""
        out.print(f"  {whose}{title:<24} {took:>8}  {path}", soft_wrap=True, markup=False)


def warning(text: str) -> None:
    """Say what somebody should look at."""
    if _speech.mode == "json":
        _write({"level": "warning", "message": text})
    else:
        err.print(f"pipeline: warning: {text}", soft_wrap=True, markup=False)


def error(text: str, **fields: object) -> None:
    """Say in one line what ended a job."""
    text = printable(text)
    if _speech.mode == "json":
        _write({"level": "error", "message": text, **fields})
    else:
        print(f"pipeline: error: {_named()}{relative(text)}", file=sys.stderr)


def ended_by(problem: Exception) -> None:
    """Say what ends a job. Anything but a refusal also shows where it came from, where the environment asks for it."""
    for text in describe(problem).splitlines():
        error(text, exit_code=exit_code(problem))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, REFUSALS):
        trace = "".join(traceback.format_exception(problem))
        if _speech.mode == "json":
            _write({"level": "error", "message": "where it came from", "traceback": trace})
        else:
            print(redact_text(trace), file=sys.stderr)


def interrupted(text: str) -> None:
    """Say what an interruption leaves."""
    if _speech.mode == "json":
        _write({"level": "error", "message": f"interrupted; {text}", "exit_code": INTERRUPTED})
    else:
        print(f"pipeline: interrupted; {text}", file=sys.stderr)


def _named() -> str:
    return printable(_speech.job.name) if _speech.job is not None else ""


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
    _speech.report = report
    report.record = True
    try:
        yield
    finally:
        text = report.export_text()  # drops what was recorded, too
        report.record = False
        _speech.report = None
    path.write_text(redact_text(text), encoding="utf-8")


@contextmanager
def progress(title: str) -> Iterator["Progress"]:
    """Show the progress of what the block does on stderr.

    A terminal gets a bar; anything else gets a line after FIRST_SECONDS, and one every LINE_SECONDS from then on, whether
    or not anything moved. Messages are printed at once. A block within a block shows nothing of its own.

    Args:
        title: What is made or done.

    Returns:
        What the block calls with a label, the units that are done, and all of them.
    """
    named, shared = _named(), _speech.job is not None and _speech.job.beside_others
    phase = Phase(title, time.monotonic)

    def say(message: str | None) -> None:
        if _speech.mode == "human":
            err.print(f"  {named}{title}: {message or phase.describe()}", soft_wrap=True, markup=False)
        elif _speech.mode == "json":
            _write({"message": f"{title}: {message or phase.describe()}", "step": title, **({} if message else phase.fields())})

    if _showing.locked():
        yield lambda label, _, total: None if total else say(label)
        return
    with _showing:
        if _speech.mode == "human" and err.is_terminal and not shared:
            place = _speech.job.place if _speech.job is not None else ""  # a bar has little room, and jobs take turns
            showing = bar(err, f"{place}{title}", phase, say)
        else:
            showing = lines(phase, say)
        with showing as update, told(update):
            yield update


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is done in the block, where it takes more than a moment."""
    with progress(what):
        yield
