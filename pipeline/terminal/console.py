"""The terminal: results on stdout, errors and progress on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from pipeline.core.records import Progress
from pipeline.core.redaction import redact_text

out = Console(highlight=False, width=None if sys.stdout.isatty() else 100)  # where nobody sets a width, tables need one
err = Console(stderr=True, highlight=False)

LINE_SECONDS = 10
"""Time between two lines of progress where there is no terminal."""


@dataclass
class Phase:
    """What a stage is doing: the calls of its progress with one label."""

    label: str
    started: float
    """When it began, in seconds of the monotonic clock."""
    first: int
    """Units that were done then: a resumed phase begins with some, which took no time now."""

    def rate(self, done: int, now: float) -> float | None:
        """Return the units a second so far; None before any is done."""
        return (done - self.first) / (now - self.started) if done > self.first and now > self.started else None

    def describe(self, done: int, total: int, now: float) -> str:
        """Return a line: what is being done, how much of how much, how fast, and how long the rest takes at that."""
        what, unit = split(self.label)
        rate = self.rate(done, now)
        text = f"{what} {done:,}/{total:,}{f' {unit}' if unit else ''}"
        if rate is None:
            return text
        return f"{text}{speed(unit, rate)}, {duration((total - done) / rate)} left"


def split(label: str) -> tuple[str, str]:
    """Split a label into what is being done, and the unit, which is empty where the label has none.

    >>> split("forced decode [tokens]"), split("build")
    (('forced decode', 'tokens'), ('build', ''))
    """
    what, _, unit = label.removesuffix("]").partition(" [")
    return what, unit


def speed(unit: str, rate: float | None) -> str:
    """Return `, 85/s`: nothing for what has no unit, since steps of a stage take as long as they like."""
    return f", {rate:,.{0 if rate >= 10 else 1}f}/s" if unit and rate is not None else ""


def duration(seconds: float) -> str:
    """Return a time in words: `45 s`, `1 min 20 s`, `2 h 05 min`.

    >>> [duration(s) for s in (44.6, 80, 7500)]
    ['45 s', '1 min 20 s', '2 h 05 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


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
    """Write what the block prints on `out` into a text file as well, without colours; nothing where the block fails."""
    out.record = True
    try:
        yield
    finally:
        text = out.export_text()  # drops what was recorded, too
        out.record = False
    path.write_text(redact_text(text), encoding="utf-8")


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Show the progress of a stage on stderr while the block runs.

    A terminal gets a bar; anything else gets a line at most every LINE_SECONDS. Messages are printed at once.

    Args:
        title: The stage's title.

    Returns:
        What the stage calls with a label, the units that are done, and all of them.
    """
    phase = Phase("", time.monotonic(), 0)

    def entered(label: str, done: int, now: float) -> bool:
        """Begin a phase with another label; return whether it was another."""
        nonlocal phase
        if label == phase.label:
            return False
        phase = Phase(label, now, done)
        return True

    if not err.is_terminal:
        last = time.monotonic()

        def line(label: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if not total:
                err.print(f"  {title}: {label}", soft_wrap=True)
                return
            entered(label, done, now)
            if now - last >= LINE_SECONDS:
                last = now
                err.print(f"  {title}: {phase.describe(done, total, now)}", soft_wrap=True)

        yield line
        return
    with bars.Progress(
        bars.TextColumn("  {task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,}/{task.total:,} {task.fields[unit]}{task.fields[speed]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=0, unit="", speed="")

        def update(label: str, done: int, total: int) -> None:
            now = time.monotonic()
            if not total:
                bar.console.print(f"  {title}: {label}", soft_wrap=True)
                return
            what, unit = split(label)
            if entered(label, done, now):
                bar.reset(task, description=f"{title}: {what}", total=total, completed=done, unit=unit, speed="")
            bar.update(task, completed=done, total=total, speed=speed(unit, phase.rate(done, now)))

        yield update
