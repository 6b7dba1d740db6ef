"""What a dry run prints: the artifacts of each job, what they take, and the sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.terminal import console


@dataclass(frozen=True)
class Row:
    """An artifact of a job."""

    job: int
    title: str
    outcome: str
    """`reused`, `made`, or `made by job 1`."""
    makes: bool
    """Whether this job would make it."""
    certain: bool
    """Whether it is asked for in any case: later rounds are where the gates want them."""
    perhaps: bool = False
    """Whether it may be there already, once what it is made from is made."""
    seconds: float | None = None
    """Expected; None where nothing tells."""
    written: int | None = None
    """Bytes on disk, expected; None where nothing tells."""
    basis: str = ""
    """What that is taken from."""
    timed: bool = True
    """Whether its time counts."""


@dataclass(frozen=True)
class Sum:
    """Expected of several artifacts: of those about which anything is known."""

    least: float
    """Of those that are asked for in any case."""
    most: float
    """Of those that may be asked for, too."""
    unknown: int
    """How many artifacts nothing tells of."""


def total(rows: Sequence[Row], name: str) -> Sum:
    """Return the sum of `seconds` or `written` over what is made."""
    made = [
        (getattr(row, name), row.certain and not row.perhaps) for row in rows if row.makes and (row.timed or name != "seconds")
    ]
    known = [(value, sure) for value, sure in made if value is not None]
    return Sum(sum(value for value, sure in known if sure), sum(value for value, _ in known), len(made) - len(known))


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table of artifacts, and what the marks in it mean."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("artifact", overflow="fold", max_width=28)
    table.add_column("is", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("disk", justify="right", no_wrap=True)
    table.add_column("taken from", overflow="fold")
    for number, row in enumerate(rows):
        job = str(row.job) if number == 0 or rows[number - 1].job != row.job else ""
        mark = ("" if row.certain else " ?") + (" *" if row.perhaps else "")
        time = _time(row.seconds) if row.timed else ""
        cells = [time, size(row.written), row.basis or "nothing tells"] if row.makes else ["", "", ""]
        table.add_row(job, row.title, row.outcome + mark, *cells, style="" if row.makes else "dim")
    console.out.print(table)
    if any(not row.certain for row in rows):
        console.out.print("? a later round: only where the gates want more samples")
    if any(row.perhaps for row in rows):
        console.out.print("* reused instead where what it is made from comes out as it was")


def print_sum(rows: Sequence[Row]) -> None:
    """Print how much is made and reused, and what that takes in all."""
    made = [row for row in rows if row.makes]
    certain = sum(row.certain and not row.perhaps for row in made)
    more = f", up to {len(made)}" if certain < len(made) else ""
    console.out.print(f"{len(rows) - len(made)} reused, {certain}{more} made")
    for name, title, words in (("seconds", "time", _time), ("written", "disk", size)):
        found = total(rows, name)
        if not made:
            continue
        text = words(found.least) + (f", up to {words(found.most)}" if found.most > found.least else "")
        known = found.unknown < len(made)
        lacking = f"; nothing tells of {found.unknown} of them" if found.unknown and known else ""
        console.out.print(f"{title}: {'at least ' if lacking else ''}{text}{lacking}" if known else f"{title}: unknown")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.1f} s" if seconds < 10 else console.duration(seconds)


def size(count: float | None) -> str:
    """Return a number of bytes in words.

    >>> [size(n) for n in (None, 900, 48_300, 7.25e9)]
    ['unknown', '0.9 kB', '48 kB', '7.2 GB']
    """
    if count is None:
        return "unknown"
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if count >= pair[0]), (1e3, "kB"))
    return f"{count / unit:,.{0 if count / unit >= 10 else 1}f} {name}"
