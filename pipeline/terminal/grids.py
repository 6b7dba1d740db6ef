"""Tables of named rows that fit any width: numbers stay whole, names wrap, columns without room move into a next band.

Rows hold values, not texts: a person sees them formatted, a log collector gets them as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

LEAST_WIDTH = 40
"""Columns of the narrowest terminal that tables are laid out for."""
NAME_WIDTH = 16
"""A name gets so many columns, or as many as it has, before the numbers beside it move into a next band."""
REMARK_WIDTH = 24
"""The same of a remark."""
CELL_WIDTH, INTEGER_WIDTH = 12, 26
"""Characters of the longest number that is written out, before it gets an exponent; 64 bits with commas fit."""
EDGES = 2
"""Columns that the box takes at both ends of a row; one more stands between two cells."""

Value = float | str | None | tuple[float, ...]


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of a few fixed words."""

    key: str
    """Its name where rows are records."""
    heading: str
    """May have several lines."""
    form: str = ""
    """Format of its numbers."""
    words: bool = False
    """Whether it holds words, which stand at the left."""

    def text(self, value: Value) -> str:
        """Return a value as it is shown; `-` for what is missing or not finite."""
        if isinstance(value, tuple):
            return "-".join(self.text(part) for part in value)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return "-"
        if isinstance(value, str):
            return value
        text = format(value, self.form)
        return text if len(text) <= (INTEGER_WIDTH if isinstance(value, int) else CELL_WIDTH) else format(value, ".2e")


@dataclass(frozen=True)
class Row:
    """A row of a grid."""

    name: str
    values: Sequence[Value]
    remark: str = ""
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: rows with a name, values, and maybe a remark."""

    title: str
    heading: str
    """Of the names."""
    columns: Sequence[Column]
    rows: Sequence[Row]
    remarks: str | None = None
    """Heading of the remarks; None where no row has one."""
    colours: Mapping[str, str] = field(default_factory=dict)
    """Styles of cells that hold these words."""

    def records(self) -> list[dict[str, object]]:
        """Return the rows by the columns' keys, with the values as they are; None for what is empty or not finite."""
        records = []
        for row in self.rows:
            record: dict[str, object] = {self.heading: row.name}
            for column, value in zip(self.columns, row.values, strict=True):
                record[column.key] = None if value == "" or (isinstance(value, float) and not math.isfinite(value)) else value
            if self.remarks is not None:
                record[self.remarks] = row.remark
            records.append(record)
        return records


def lay_out(grid: Grid, width: int) -> list[Table]:
    """Return the tables that show a grid in so many columns, from top to bottom.

    No number is cut or wrapped at LEAST_WIDTH and above; names and remarks wrap.
    """
    cells = [[column.text(value) for column, value in zip(grid.columns, row.values, strict=True)] for row in grid.rows]
    names = _widest([grid.heading, *(row.name for row in grid.rows)], NAME_WIDTH)
    remarks = _widest([grid.remarks, *(row.remark for row in grid.rows)], REMARK_WIDTH) if grid.remarks is not None else 0
    room = max(width, LEAST_WIDTH) - EDGES - names
    bands, left = [list[int]()], room
    for index, column in enumerate(grid.columns):
        needed = 1 + _widest([*column.heading.split("\n"), *(row[index] for row in cells)])
        if bands[-1] and needed > left:
            bands.append([])
            left = room
        bands[-1].append(index)
        left -= needed
    if remarks and left <= remarks:
        bands.append([])
    return [_table(grid, cells, band, title=not number, last=band is bands[-1]) for number, band in enumerate(bands)]


def _table(grid: Grid, cells: Sequence[Sequence[str]], band: Sequence[int], *, title: bool, last: bool) -> Table:
    """Return a table of some columns; the last one has the remarks."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title=grid.title if title else None, title_justify="left")
    table.add_column(grid.heading, overflow="fold")
    for index in band:
        column = grid.columns[index]
        table.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
    remarked = last and grid.remarks is not None
    if remarked:
        table.add_column(grid.remarks or "", overflow="fold")
    for row, texts in zip(grid.rows, cells, strict=True):
        shown = [Text(texts[index], style=grid.colours.get(texts[index], "")) for index in band]
        table.add_row(Text(row.name), *shown, *([Text(row.remark)] if remarked else []), style=row.style)
    return table


def _widest(texts: Sequence[str], most: int = 1 << 20) -> int:
    return min(most, max(map(len, texts), default=0))
