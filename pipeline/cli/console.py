"""Output of a command: lines and tables on stdout; progress, warnings and errors on stderr, in the format given by `log=`."""

import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stages.core.errors import DEBUG_VARIABLE, Refusal, describe, exit_code
from stages.core.redaction import printable, redact, redact_text
from stages.core.streams import program_name

MODES = ("human", "json", "quiet")
"""Values of `log=`."""
RESULT = "result"
"""Key with a printed line, or the title of a table, in JSON. Objects without this key are events."""
PLAIN_WIDTH = 100
"""Columns of tables if the output is not a terminal."""
PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}
"""Level -> beginning of a line for people, after the program's name."""

if os.environ.get("COLUMNS") == "0":  # an unknown width, in which rich would print nothing
    del os.environ["COLUMNS"]
_wide = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ  # None: it was closed
out = Console(highlight=False, emoji=False, width=None if _wide else PLAIN_WIDTH)
err = Console(highlight=False, emoji=False, stderr=True)


def relative(text: str) -> str:
    """Return a text with paths below the current directory made relative. In URLs, only `sqlite:///` paths change."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return text
    if here == "/":
        return text
    return re.sub(rf"(?:(?<=sqlite:///)|(?<![\w./:~-])){re.escape(here)}/(?=[^\s/])", "", text)


Line = str | Text
"""A line for people, perhaps with styles."""


def styled(style: str, beginning: str, rest: str = "") -> Text:
    """Return a line whose beginning has a style of rich, for example `bold`."""
    return Text.assemble((beginning, style), rest)


def note(text: str) -> Text:
    return styled("yellow", "note:", f" {text}")


@dataclass(frozen=True)
class JobPlace:
    """The job of this process, and its place among the jobs of the command."""

    stage: str
    policy: str
    number: int = 1
    total: int = 1
    concurrent: bool = False
    """Whether concurrent jobs share a terminal. A bar would overwrite the lines of other jobs."""

    @property
    def place(self) -> str:
        """`job 2 of 5: `; empty if it is the only job."""
        return f"job {self.number} of {self.total}: " if self.total > 1 else ""

    @property
    def name(self) -> str:
        """Prefix of the job's lines, `job 2 of 5 int8: `; empty if it is the only job."""
        return printable(f"{self.place[:-2]} {self.policy}: ") if self.total > 1 else ""

    @property
    def fields(self) -> dict[str, object]:
        return {"stage": self.stage, "policy": self.policy, "job": self.number, "jobs": self.total}


CELL_WIDTH, INTEGER_WIDTH = 12, 26
"""Maximum characters of a float and of an integer; longer numbers get an exponent. 64-bit integers with commas fit."""
TEXT_WIDTH = 18
"""Minimum characters of a text before the text wraps. A table with less space gets wider than the terminal."""

Value = float | str | None


@dataclass(frozen=True)
class Column:
    heading: str
    """Heading, possibly with several lines."""
    form: str = ""
    """Format specification of numbers."""

    def text(self, value: Value) -> str:
        """Return a value as text; `-` if it is missing or not finite."""
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "-"
        text = format(value, self.form)
        return text if len(text) <= (INTEGER_WIDTH if isinstance(value, int) else CELL_WIDTH) else format(value, ".2e")


@dataclass(frozen=True)
class Grid:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    styles: Mapping[str, str] = field(default_factory=dict)
    """Text -> style of the cells with this text."""

    def texts(self) -> list[list[str]]:
        """Return the table as text: the headings, then the rows."""
        headings = [" ".join(column.heading.split()) for column in self.columns]
        return [headings, *([*map(Column.text, self.columns, row)] for row in self.rows)]

    def table(self, width: int) -> Table:
        """Return the table for a terminal of `width` columns. Columns with only texts wrap; numbers are never cut."""
        _, *rows = self.texts()
        title = Text(self.title, "table.title") if self.title else None
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title=title, title_justify="left")
        for index, column in enumerate(self.columns):
            heading, numbers = column.heading, any(isinstance(row[index], int | float) for row in self.rows)
            widest = max(map(len, [*heading.split("\n"), *(row[index] for row in rows)]))
            side: Literal["left", "right"] = "right" if numbers else "left"
            least_width = widest if numbers else min(widest, TEXT_WIDTH)
            table.add_column(heading, justify=side, no_wrap=numbers, overflow="fold", min_width=least_width)
        min_width = sum((column.min_width or 0) + 1 for column in table.columns)
        table.width = min_width if min_width > width else None
        for row in rows:
            table.add_row(*(Text(text, style=self.styles.get(text, "")) for text in row))
        return table


def _write(fields: Mapping[str, object]) -> None:
    """Write a JSON object with the time and the job: a result to stdout, other objects to stderr."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    job = HANDLER.job.fields if HANDLER.job is not None else {}
    plain = json.loads(json.dumps({"time": now, **job, **fields}, default=str))  # redacted before quotes are escaped
    text = json.dumps(redact(plain), ensure_ascii=False)
    # one write, because jobs and threads share the streams
    print(f"{text}\n", end="", file=sys.stdout if RESULT in fields else sys.stderr, flush=True)


class _Handler(logging.Handler):
    """Writes log records to stderr: lines for people, or JSON objects with the record's `fields`."""

    mode = "human"
    job: JobPlace | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # a library's arguments do not match its format
            text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info:
            fields = {"traceback": redact_text(logging.Formatter().formatException(record.exc_info))}
        if self.mode == "json":
            _write({"level": record.levelname.lower(), "message": " ".join(text.split()), **fields})
            return
        prefix = "  " if "step" in fields else ""
        if record.levelno in PREFIXES:
            prefix = f"{program_name()}: {PREFIXES[record.levelno]}"
        name = self.job.name if self.job is not None else ""
        err.print(relative(str(fields.get("traceback", f"{prefix}{name}{text}"))), soft_wrap=True, markup=False)


LOGGER = logging.getLogger("kvgate")
"""Logger of all events. Modules that do not import `console` use child loggers, such as `kvgate.waits` for locks."""
HANDLER = _Handler()
LOGGER.addHandler(HANDLER)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def configure(mode: str) -> None:
    """Set the format of all output. With `json`, warnings and log records of libraries become JSON lines too."""
    HANDLER.mode = mode
    LOGGER.setLevel(logging.WARNING if mode == "quiet" else logging.INFO)
    if mode == "quiet":
        warnings.simplefilter("ignore")
    logging.captureWarnings(mode == "json")
    if mode == "json":
        logging.getLogger().addHandler(HANDLER)
    else:
        logging.getLogger().removeHandler(HANDLER)


def close() -> None:
    """Undo what `configure` and `begin` did to the process, except for ignored warnings."""
    configure("human")
    end()


def begin(job: JobPlace, model: str | None = None) -> None:
    """Start a job, and announce it if it works on a model."""
    end()
    if model is not None:
        event(logging.INFO, f"{job.place}{job.stage} {job.policy} of {model}", **job.fields)
    HANDLER.job = job


def end() -> None:
    """End the job: later lines do not name it."""
    HANDLER.job = None


def say(*lines: Line, paste: bool = False) -> None:
    """Print lines for people, or write each line as a JSON object.

    `paste`: whether users copy the lines (commands, addresses). Other lines are wrapped between words on terminals.
    """
    for line in lines:
        if HANDLER.mode == "json":
            if str(line).strip():
                _write({RESULT: str(line).strip()})
            continue
        text = Text(line) if isinstance(line, str) else line.copy()
        text.plain = relative(text.plain)
        out.print(text, soft_wrap=paste or not out.is_terminal)


def show(grid: Grid) -> None:
    """Print a table, or write it as a JSON object with the headings as the first row."""
    if HANDLER.mode == "json":
        _write({RESULT: grid.title, "rows": grid.texts()})
    else:
        out.print(grid.table(out.width), crop=False)


def event(level: int, text: str, **fields: object) -> None:
    LOGGER.log(level, "%s", text, extra={"fields": fields})


def step(title: str, path: Path, seconds: float | None) -> None:
    """Report an artifact. `seconds`: how long it took; None if it was reused."""
    duration = "reused" if seconds is None else f"{seconds:.1f} s"
    event(logging.INFO, f"{title:<24} {duration:>8}  {path}", step=title)


def warning(text: str) -> None:
    event(logging.WARNING, text)


def error(text: str, **fields: object) -> None:
    """Print the error that ended a job, in one line."""
    event(logging.ERROR, printable(text), **fields)


def ended_by(problem: Exception) -> None:
    """Print the errors that ended a job. If KVGATE_DEBUG is 1, also print the traceback of an unexpected exception."""
    for text in describe(problem).splitlines():
        error(text, exit_code=exit_code(problem))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(problem, Refusal):
        LOGGER.error("where it came from", exc_info=problem)


@contextmanager
def silent() -> Iterator[None]:
    """Print neither results nor progress while the block runs."""
    previous = out.quiet, err.quiet
    out.quiet = err.quiet = True
    try:
        yield
    finally:
        out.quiet, err.quiet = previous
