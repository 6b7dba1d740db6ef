"""What a stage is doing: how much of how much, how fast, how long the rest takes, as a bar or as lines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.terminal.texts import between_words

if TYPE_CHECKING:
    from pipeline.core.records import Progress

FIRST_SECONDS = 1.5
"""Time before the first line of progress where there is no terminal."""
LINE_SECONDS = 10
"""Time between two lines from then on."""
BAR_WIDTH = 10
"""Columns of the narrowest bar; the widest has four times as many."""
INDENT = "  "


class Phase:
    """The calls of a stage's progress with one label; before the first one, that it gets ready.

    Args:
        label: What the stage is doing, until it says so.
        clock: Seconds of the monotonic clock.
    """

    def __init__(self, label: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: dict[str, tuple[int, int, float]] = {}
        """Of labels that another one interrupted: first and last units, and seconds."""
        self.label, self.first, self.started = label, 0, clock()
        self.done, self.total = 0, 0

    def update(self, label: str, done: int, total: int) -> None:
        """Take a call of the stage's progress; of a label from before it goes on where that one was."""
        if label != self.label or not self.total:
            self._left[self.label] = self.first, self.done, self.seconds
            first, last, seconds = self._left.get(label, (done, done, 0.0))  # units of a resumed run took no time now
            if done < last:  # another round
                first, seconds = done, 0.0
            self.label, self.first, self.started = label, first, self._clock() - seconds
        self.done, self.total = done, total

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return self._clock() - self.started

    @property
    def rate(self) -> float | None:
        """Units a second so far; None before any is done, and once all are."""
        seconds = self.seconds
        return (self.done - self.first) / seconds if self.first < self.done < self.total and seconds > 0 else None

    def describe(self) -> str:
        """Return what is being done, how much of how much, how fast, and how long the rest takes at that."""
        if not self.total:
            return f"{duration(self.seconds)} so far"
        what, unit = split(self.label)
        if self.total == 1 and not unit:  # one thing, of which nothing is counted
            return f"{what}, {duration(self.seconds)} so far".removeprefix(", ")
        text = f"{what} {self.done:,}/{self.total:,}{f' {unit}' if unit else ''}"
        rate = self.rate
        if rate is None:
            return f"{text}, {duration(self.seconds)} so far"
        return f"{text}{speed(rate)}, {duration((self.total - self.done) / rate)} left"

    def fields(self) -> dict[str, object]:
        """Return the same for a log collector."""
        if not self.total:
            return {"seconds": round(self.seconds, 1)}
        what, unit = split(self.label)
        rate = self.rate
        left = {} if rate is None else {"rate": round(rate, 3), "seconds_left": round((self.total - self.done) / rate, 1)}
        return {"phase": what, "unit": unit, "done": self.done, "total": self.total, "seconds": round(self.seconds, 1), **left}


def split(label: str) -> tuple[str, str]:
    """Split a label into what is being done, and the unit, which is empty where the label has none.

    >>> split("forced decode [tokens]"), split("build")
    (('forced decode', 'tokens'), ('build', ''))
    """
    what, _, unit = label.removesuffix("]").partition(" [")
    return what, unit


def speed(rate: float | None) -> str:
    """Return `, 85/s`, or `, 25 s each` for units that take longer than a second.

    >>> speed(85.2), speed(2.5), speed(0.04)
    (', 85/s', ', 2.5/s', ', 25 s each')
    """
    if rate is None:
        return ""
    return f", {rate:,.{0 if rate >= 10 else 1}f}/s" if rate >= 1 else f", {duration(1 / rate)} each"


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
def lines(phase: Phase, say: Callable[[str | None], None]) -> Iterator["Progress"]:
    """Say how a phase goes on every LINE_SECONDS, also while nothing calls.

    Args:
        phase: What calls of the progress go to.
        say: Prints a message; of None, the phase.

    Returns:
        The progress to call.
    """
    over = threading.Event()

    def repeat() -> None:
        seconds: float = FIRST_SECONDS
        while not over.wait(seconds):
            say(None)
            seconds = LINE_SECONDS

    def update(label: str, done: int, total: int) -> None:
        if total:
            phase.update(label, done, total)
        else:
            say(label)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        over.set()
        thread.join()


class _Shown:
    """A phase as a terminal shows it: its line, wrapped between words, and a bar behind it where there is room for one."""

    def __init__(self, title: str, phase: Phase) -> None:
        self._title = title
        self._phase = phase

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(f"{self._title}: {self._phase.describe()}")
        width = options.max_width - 1  # some terminals wrap what ends at their last column
        parts = between_words(text, width - 2 * len(INDENT))
        *above, last = [Text(INDENT * (2 if number else 1)) + part for number, part in enumerate(parts)]
        yield from above
        room = width - last.cell_len - 1
        if room < BAR_WIDTH:
            yield last
            return
        row = Table.grid(padding=(0, 1))
        total = self._phase.total
        row.add_row(last, ProgressBar(total or 1, self._phase.done, min(room, 4 * BAR_WIDTH), pulse=not total))
        yield row


@contextmanager
def bar(console: Console, title: str, phase: Phase, say: Callable[[str | None], None]) -> Iterator["Progress"]:
    """Show a phase as a bar on a terminal, below what else is printed there; the arguments are as of `lines`."""

    def update(label: str, done: int, total: int) -> None:
        if total:
            phase.update(label, done, total)
        else:
            say(label)

    with Live(_Shown(title, phase), console=console, transient=True):
        yield update
