"""The terminal: results on stdout, errors and progress on stderr."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

from pipeline.core.records import Progress

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Show the progress of a stage on stderr while the block runs.

    A terminal gets a bar; anything else gets a line at most every ten seconds.

    Args:
        title: The stage's title.

    Returns:
        What the stage calls with a label, the units that are done, and all of them.
    """
    if not err.is_terminal:
        last = time.monotonic()

        def line(label: str, done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= 10:
                last = time.monotonic()
                err.print(f"  {title}: {label} {done}/{total}")

        yield line
        return
    columns = (bars.TextColumn("  {task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def update(label: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {label}", completed=done, total=total)

        yield update
