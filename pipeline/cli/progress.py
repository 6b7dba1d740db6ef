"""Progress of a stage as a bar or as lines: done and total units, rate, and remaining time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

FIRST_SECONDS = 1.5
"""Seconds before the first line of progress, without a terminal."""
LINE_SECONDS = 10
"""Seconds between later lines."""
BAR_WIDTH = 20


class Phases:
    """Progress of a stage by label. Every label is a task of rich, so a task continues after an interruption by another.

    Args:
        title: Description of the work.
        terminal: Console for the bar; None draws no bar.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, title: str, terminal: Console | None, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (_Described(title), BarColumn(BAR_WIDTH))
        self.bars = Bars(*columns, console=terminal, transient=True, disable=terminal is None, get_time=clock)
        self.bars.add_task("", total=None)
        (self.task,) = self.bars.tasks
        """The current task. Before the first call and between two files, this is a task without a label."""
        self._tasks = {"": self.task}

    def update(self, label: str, done: int, total: int) -> None:
        """Update the task of a label. Arguments: see `stages.core.records.Progress`."""
        if label not in self._tasks:
            self.bars.add_task(label, completed=done, total=total, first=done)
            self._tasks[label] = self.bars.tasks[-1]
        elif label and done < self._tasks[label].completed:
            self.bars.reset(self._tasks[label].id, completed=done, total=total, first=done)  # another round starts
        if self.task is not self._tasks[label]:
            self.bars.update(self.task.id, visible=False)
            self.task = self._tasks[label]
        if label:
            self.bars.update(self.task.id, completed=done, total=total, visible=True)


class _Described(ProgressColumn):
    """Column with the description of a task. Long descriptions wrap between words."""

    def __init__(self, title: str) -> None:
        super().__init__(Column(ratio=1))
        self._title = title

    def render(self, task: Task) -> Text:
        return Text(f"  {self._title}: {describe(task)}")


def describe(task: Task) -> str:
    """Return a description of a task: label, done and total units, rate, and remaining time at this rate."""
    seconds = f"{duration(task.elapsed or 0.0)} so far"
    if task.total is None:
        return seconds
    what, unit = split(task.description)
    text = f"{what} {task.completed:,.0f}/{task.total:,.0f}{f' {unit}' if unit else ''}"
    rate = rate_of(task)
    if rate is None:
        return f"{text}, {seconds}"
    pace = f"{rate:,.{0 if rate >= 10 else 1}f}/s" if rate >= 1 else f"{duration(1 / rate)} each"
    return f"{text}, {pace}, {duration((task.remaining or 0.0) / rate)} left"


def rate_of(task: Task) -> float | None:
    """Return the mean units per second, without units from before a resumption; None before the first and after the last.

    rich's own rate is useless for slow steps: it covers only the last 30 seconds.
    """
    done, seconds = task.completed - task.fields["first"], task.elapsed or 0.0
    return done / seconds if done > 0 and seconds > 0 and not task.finished else None


def fields(task: Task) -> dict[str, object]:
    """Return the state of a task as fields for a log collector."""
    seconds = round(task.elapsed or 0.0, 1)
    if task.total is None:
        return {"seconds": seconds}
    what, unit = split(task.description)
    found: dict[str, object] = {"phase": what, "unit": unit, "done": task.completed, "total": task.total, "seconds": seconds}
    rate = rate_of(task)
    return found if rate is None else found | {"rate": round(rate, 3), "seconds_left": round((task.remaining or 0.0) / rate, 1)}


def split(label: str) -> tuple[str, str]:
    """Split a label into the description of the work and its unit, which may be empty.

    >>> split("forced decode [tokens]"), split("build")
    (('forced decode', 'tokens'), ('build', ''))
    """
    what, _, unit = label.removesuffix("]").partition(" [")
    return what, unit


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
def repeated(say: Callable[[], None]) -> Iterator[None]:
    """Call `say` every LINE_SECONDS while the block runs, even without progress."""
    over = threading.Event()

    def repeat() -> None:
        seconds: float = FIRST_SECONDS
        while not over.wait(seconds):
            say()
            seconds = LINE_SECONDS

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
