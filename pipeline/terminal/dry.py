"""What a dry run prints: the artifacts of each job, what they take, and the sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.terminal import console
from pipeline.terminal.grids import Column, Grid
from pipeline.terminal.grids import Row as GridRow
from pipeline.terminal.phases import duration

COLUMNS = (
    Column("job", "job"),
    Column("is", "is", words=True),
    Column("seconds", "time\n(s)", ",.1f"),
    Column("megabytes", "disk\n(MB)", ",.1f"),
    Column("peak_megabytes", "memory\n(MB)", ",.0f"),
)


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
    peak: int | None = None
    """Most resident memory of the process, in bytes, expected; None where nothing tells."""
    basis: str = ""
    """What that is taken from."""
    timed: bool = True
    """Whether its time counts."""

    @property
    def marked(self) -> str:
        """What becomes of it, with the marks that `print_rows` explains."""
        return self.outcome + ("" if self.certain else " ?") + (" *" if self.perhaps else "")


@dataclass(frozen=True)
class Sum:
    """Expected of several artifacts, together or at most: of those about which anything is known."""

    least: float
    """Of those that are asked for in any case."""
    most: float
    """Of those that may be asked for, too."""
    known: int
    """How many artifacts these are."""
    unknown: int
    """How many others nothing tells of."""


def total(rows: Sequence[Row], name: str) -> Sum:
    """Return the sum of `seconds` or `written`, or the largest `peak`, over what is made."""
    counted = [row for row in rows if row.makes and (row.timed or name == "written")]
    made = [(getattr(row, name), row.certain and not row.perhaps) for row in counted]
    known = [(value, sure) for value, sure in made if value is not None]
    sure_ones, all_ones = [value for value, sure in known if sure], [value for value, _ in known]
    least, most = (max(values, default=0) if name == "peak" else sum(values) for values in (sure_ones, all_ones))
    return Sum(least, most, len(known), len(made) - len(known))


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table of artifacts, and what the marks in it mean."""
    shown = []
    for row in rows:
        sizes = [None if count is None else count / 1e6 for count in (row.written, row.peak)]
        values = (row.job, row.marked, row.seconds, *sizes) if row.makes else (row.job, row.marked, "", "", "")
        remark = (row.basis or "nothing tells") if row.makes else ""
        shown.append(GridRow(row.title, values, remark, "" if row.makes else "dim"))
    console.show("dry", Grid("", "artifact", COLUMNS, shown, remarks="taken from"))
    if any(not row.certain for row in rows):
        console.say("? a later round: only where the gates want more samples")
    if any(row.perhaps for row in rows):
        console.say("* reused instead where what it is made from comes out as it was")


def print_sum(rows: Sequence[Row]) -> None:
    """Print how much is made and reused, and what that takes in all."""
    made = [row for row in rows if row.makes]
    certain = sum(row.certain and not row.perhaps for row in made)
    more = f", up to {len(made)}" if certain < len(made) else ""
    console.say(f"{len(rows) - len(made)} reused, {certain}{more} made")
    for name, title, words in (("seconds", "time", _time), ("written", "disk", size), ("peak", "peak memory", size)):
        found = total(rows, name)
        if not made:
            continue
        text = words(found.least) + (f", up to {words(found.most)}" if found.most > found.least else "")
        lacking = f"; nothing tells of {found.unknown} of them" if found.unknown else ""
        console.say(f"{title}: {'at least ' if lacking else ''}{text}{lacking}" if found.known else f"{title}: unknown")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def size(count: float) -> str:
    """Return a number of bytes in words.

    >>> [size(n) for n in (900, 48_300, 7.25e9)]
    ['0.9 kB', '48 kB', '7.2 GB']
    """
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if count >= pair[0]), (1e3, "kB"))
    return f"{count / unit:,.{0 if count / unit >= 10 else 1}f} {name}"
