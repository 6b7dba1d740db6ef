"""Progress of a stage on stderr: a bar on a terminal, else lines at regular intervals."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from pipeline.cli import console

if TYPE_CHECKING:
    from stages.core.records import Progress

FIRST_SECONDS = 1.5
"""Seconds before the first line of progress, without a terminal."""
LINE_SECONDS = 10
"""Seconds between later lines."""

_showing = threading.Lock()


class Phases(ProgressColumn):
    """Progress of a stage by label. Every label is a task of rich, so a task continues after an interruption by another.

    `terminal`: console for the bar; None draws no bar. `clock`: monotonic clock in seconds.
    """

    def __init__(self, title: str, terminal: Console | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Column(ratio=1))
        self._title = title
        self.bars = Bars(self, BarColumn(20), console=terminal, transient=True, disable=terminal is None, get_time=clock)
        self.bars.add_task("", total=None)
        (self.task,) = self.bars.tasks
        """The current task. Before the first label, and after an empty one, this is a task without a label."""
        self._tasks = {"": self.task}

    def update(self, label: str, done: int, total: int) -> None:
        """Update the task of a label. Arguments: see `stages.core.records.Progress`."""
        if label not in self._tasks or done < self._tasks[label].completed:  # a new label, or a label that starts again
            self.bars.add_task(label, completed=done, total=total, first=done)
            self._tasks[label] = self.bars.tasks[-1]
        if self.task is not self._tasks[label]:
            self.bars.update(self.task.id, visible=False)
            self.task = self._tasks[label]
        if label:
            self.bars.update(self.task.id, completed=done, total=total, visible=True)

    def render(self, task: Task) -> Text:
        return Text(f"  {self._title}: {describe_task(task)}")


def describe_task(task: Task) -> str:
    """Return a task's label, units, rate and remaining time.

    The rate is the mean over the task; units done before a resumption do not count. rich's own rate covers only the last 30
    seconds, which is useless for slow steps.
    """
    seconds = task.elapsed or 0.0
    if task.total is None:
        return f"{duration(seconds)} so far"
    what, _, unit = task.description.removesuffix("]").partition(" [")  # "forced decode [tokens]"
    text = f"{what} {task.completed:,.0f}/{task.total:,.0f}{f' {unit}' if unit else ''}"
    new = task.completed - task.fields["first"]
    if new <= 0 or seconds <= 0 or task.finished:
        return f"{text}, {duration(seconds)} so far"
    rate = new / seconds
    remaining = (task.remaining or 0.0) / rate
    pace = f"{rate:,.{0 if rate >= 10 else 2}f}/s"
    return f"{text}, {pace}, {duration(remaining)} left"


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
    """Call `say` after FIRST_SECONDS, then every LINE_SECONDS, while the block runs, even without progress."""
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
def show_progress(title: str) -> "Iterator[Progress]":
    """Show the progress of the block on stderr: a bar on a terminal, else lines at regular intervals.

    The lines continue while the block reports no progress. Without a terminal, a block that ends within FIRST_SECONDS shows
    nothing. For nested calls, only the outer block shows progress. Yield a function (label, done units, total units) for the
    block to call. A total of 0 marks a message, which is printed at once.
    """

    def log_line(message: str) -> None:
        console.event(logging.INFO, f"{title}: {message}", step=title)

    if _showing.locked():
        yield lambda label, _, total: None if total else log_line(label)
        return
    job = console.HANDLER.job
    drawn = console.HANDLER.mode == "human" and console.err.is_terminal and not (job is not None and job.concurrent)
    phases = Phases(f"{job.place if job is not None else ''}{title}", console.err if drawn else None)
    lines = _repeated(lambda: log_line(describe_task(phases.task)))
    with _showing, phases.bars if drawn else lines:
        yield lambda label, done, total: phases.update(label, done, total) if total else log_line(label)
