"""Output of a command: results on stdout; progress, warnings and errors on stderr, in the format given by `log=`."""

import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from stages.core.errors import DEBUG_VARIABLE, Refusal, describe, exit_code
from stages.core.redaction import printable, redact_text

if TYPE_CHECKING:
    from pipeline.cli.grids import Grid
    from stages.core.records import Progress

MODES = ("human", "json", "quiet")
"""Values of `log=`."""
RESULT = "result"
"""Key with the kind of a result in JSON. Objects without this key are events."""
FIRST_SECONDS = 1.5
"""Seconds before the first line of progress, without a terminal."""
LINE_SECONDS = 10
"""Seconds between later lines."""
PLAIN_WIDTH = 100
"""Columns of tables if the output is not a terminal."""
PREFIXES = {logging.WARNING: "pipeline: warning: ", logging.ERROR: "pipeline: error: "}
"""Level -> beginning of a line for people."""

if os.environ.get("COLUMNS") == "0":  # an unknown width, in which rich would print nothing
    del os.environ["COLUMNS"]
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
class JobPlace:
    """The job of this process, and its place among the jobs of the command."""

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


_showing = threading.Lock()


def _write(fields: Mapping[str, object]) -> None:
    """Write a JSON object with the time and the job: a result to stdout, other objects to stderr."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    job = HANDLER.job.fields if HANDLER.job is not None else {}
    text = json.dumps({"time": now, **job, **fields}, ensure_ascii=False, default=str)
    # one write, because jobs and threads share the streams
    print(f"{redact_text(text)}\n", end="", file=sys.stdout if RESULT in fields else sys.stderr, flush=True)


class _Handler(logging.Handler):
    """Writes log records to stderr: lines for people, or JSON objects with the record's `fields`."""

    mode = "human"
    """Value of `log=`."""
    job: JobPlace | None = None
    """The job of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info:
            fields = {"traceback": redact_text(logging.Formatter().formatException(record.exc_info))}
        if self.mode == "json":
            _write({"level": record.levelname.lower(), "message": " ".join(text.split()), **fields})
            return
        prefix = PREFIXES.get(record.levelno, "  " if "step" in fields else "")
        name = self.job.name if self.job is not None else ""
        err.print(relative(str(fields.get("traceback", f"{prefix}{name}{text}"))), soft_wrap=True, markup=False)


def _is_unprinted(record: logging.LogRecord) -> bool:
    """Return whether no library prints the record itself, with a handler below the root logger."""
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        if any(type(handler) is logging.StreamHandler for handler in logger.handlers):
            return False
        logger = logger.parent
    return True


LOGGER = logging.getLogger("kvgate")
"""Logger of all events. Modules that do not import this one, such as waits for locks and stores, log below its name."""
HANDLER = _Handler()
HANDLER.addFilter(_is_unprinted)
LOGGER.addHandler(HANDLER)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def configure(mode: str) -> None:
    """Set the format of all output. With `json`, warnings and log records of libraries become JSON lines too."""
    if mode != HANDLER.mode:
        close()
    HANDLER.mode = mode
    LOGGER.setLevel(logging.WARNING if mode == "quiet" else logging.INFO)
    if mode == "quiet":
        warnings.simplefilter("ignore")
    if mode == "json":
        logging.captureWarnings(True)
        logging.getLogger().addHandler(HANDLER)


def close() -> None:
    """Undo what `configure` did to the process, except for ignored warnings."""
    if HANDLER.mode == "json":
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(HANDLER)
    HANDLER.mode, HANDLER.job = "human", None
    LOGGER.setLevel(logging.INFO)


def begin(job: JobPlace, model: str | None = None) -> None:
    """Start a job, and announce it if it works on a model."""
    end()
    if model is not None:
        _event(logging.INFO, f"{job.place}{job.stage} {job.policy} of {model}", **job.fields)
    HANDLER.job = job


def end() -> None:
    """End the job: later lines do not name it."""
    HANDLER.job = None


def result(kind: str, *lines: str, paste: bool = False, **fields: object) -> None:
    """Print lines for people, or write a JSON object.

    Args:
        kind: Name of the object.
        lines: Text for people, with markup.
        paste: Whether users copy the lines (commands, addresses). Other lines are wrapped between words on terminals.
        fields: Content of the object.
    """
    if HANDLER.mode == "json":
        _write({RESULT: kind, **fields})
        return
    for text in map(relative, lines):
        out.print(text, soft_wrap=paste or not out.is_terminal)


def say(text: str, *, paste: bool = False) -> None:
    """Print a line for people, or write a result of kind `text`. Arguments: see `result`."""
    if text.strip() or HANDLER.mode != "json":
        result("text", text, paste=paste, message=Text.from_markup(text.strip()).plain)


def show(kind: str, grid: "Grid") -> None:
    """Print a table, or write its rows as a JSON object."""
    if HANDLER.mode == "json":
        _write({RESULT: kind, "title": grid.title, "rows": grid.records()})
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
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, Refusal):
        LOGGER.error("where it came from", exc_info=problem)


@contextmanager
def silent() -> Iterator[None]:
    """Print neither results nor progress while the block runs."""
    before = out.quiet, err.quiet
    out.quiet = err.quiet = True
    try:
        yield
    finally:
        out.quiet, err.quiet = before


class Phases(ProgressColumn):
    """Progress of a stage by label. Every label is a task of rich, so a task continues after an interruption by another.

    Args:
        title: Description of the work.
        terminal: Console for the bar; None draws no bar.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, title: str, terminal: Console | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Column(ratio=1))
        self._title = title
        self.bars = Bars(self, BarColumn(20), console=terminal, transient=True, disable=terminal is None, get_time=clock)
        self.bars.add_task("", total=None)
        (self.task,) = self.bars.tasks
        """The current task. Before the first call and between two files, this is a task without a label."""
        self._tasks = {"": self.task}

    def update(self, label: str, done: int, total: int) -> None:
        """Update the task of a label. Arguments: see `stages.core.records.Progress`."""
        if label not in self._tasks or done < self._tasks[label].completed:  # of a new label, or of another round
            self.bars.add_task(label, completed=done, total=total, first=done)
            self._tasks[label] = self.bars.tasks[-1]
        if self.task is not self._tasks[label]:
            self.bars.update(self.task.id, visible=False)
            self.task = self._tasks[label]
        if label:
            self.bars.update(self.task.id, completed=done, total=total, visible=True)

    def render(self, task: Task) -> Text:
        """Return the text before the bar. Long texts wrap between words."""
        return Text(f"  {self._title}: {described(task)[0]}")


def described(task: Task) -> tuple[str, dict[str, object]]:
    """Return a task's label, units, rate and remaining time as text for people, and as fields for log collectors.

    The rate is the mean without units from before a resumption. rich's own rate covers only the last 30
    seconds, which is useless for slow steps.
    """
    seconds = task.elapsed or 0.0
    if task.total is None:
        return f"{duration(seconds)} so far", {"seconds": round(seconds, 1)}
    what, _, unit = task.description.removesuffix("]").partition(" [")  # "forced decode [tokens]"
    text = f"{what} {task.completed:,.0f}/{task.total:,.0f}{f' {unit}' if unit else ''}"
    fields = {"phase": what, "unit": unit, "done": task.completed, "total": task.total, "seconds": round(seconds, 1)}
    new = task.completed - task.fields["first"]
    if new <= 0 or seconds <= 0 or task.finished:
        return f"{text}, {duration(seconds)} so far", fields
    rate = new / seconds
    left = (task.remaining or 0.0) / rate
    pace = f"{rate:,.{0 if rate >= 10 else 2}f}/s"
    return f"{text}, {pace}, {duration(left)} left", fields | {"rate": round(rate, 3), "seconds_left": round(left, 1)}


def duration(seconds: float) -> str:
    """Return a duration as text: `45 s`, `1 min 20 s`, `2 h 05 min`.

    >>> [duration(s) for s in (44.6, 80, 7500)]
    ['45 s', '1 min 20 s', '2 h 05 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


@contextmanager
def _repeated(say: Callable[[], None]) -> Iterator[None]:
    """Call `say` every LINE_SECONDS while the block runs, even without progress."""
    over = threading.Event()

    def repeat() -> None:
        over.wait(FIRST_SECONDS)
        while not over.is_set():
            say()
            over.wait(LINE_SECONDS)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def progress(title: str) -> "Iterator[Progress]":
    """Show the progress of the block on stderr: a bar on a terminal, else lines at regular intervals, even without progress.

    A short block shows nothing. Messages are printed at once. For nested calls, only the outer block shows progress.

    Yields:
        A function (label, done units, total units) for the block to call. A total of 0 marks a message.
    """

    def said(message: str, fields: Mapping[str, object]) -> None:
        _event(logging.INFO, f"{title}: {message}", **{"step": title, **fields})

    if _showing.locked():
        yield lambda label, _, total: None if total else said(label, {})
        return
    job = HANDLER.job
    drawn = HANDLER.mode == "human" and err.is_terminal and not (job is not None and job.beside_others)
    phases = Phases(f"{job.place if job is not None else ''}{title}", err if drawn else None)
    lines = _repeated(lambda: said(*described(phases.task)))
    with _showing, phases.bars if drawn else lines:
        yield lambda label, done, total: phases.update(label, done, total) if total else said(label, {})
