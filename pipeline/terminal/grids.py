"""Tables of named rows that fit any width: numbers stay whole, names wrap or become footnotes, columns move into a next band.

Rows hold values, not texts: a person sees them formatted, a log collector gets them as they are.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

LEAST_WIDTH = 40
"""Columns of the narrowest terminal that tables are laid out for."""
NAME_WIDTH = 16
"""A name gets so many columns, or as many as it has, before the numbers beside it move into a next band."""
REMARK_WIDTH = 24
"""The same of a remark, before it is printed in a band of its own."""
CELL_WIDTH = 12
"""Characters of the longest number with decimals that is written out, before it gets an exponent, and of a heading's line."""
INTEGER_WIDTH = 26
"""The same of integers: 64 bits with commas."""
FOOTNOTE_WIDTH = 4
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


def lay_out(grid: Grid, width: int) -> list[Table | Text]:
    """Return what shows a grid in so many columns, from top to bottom.

    No number is cut or wrapped at LEAST_WIDTH and above. A name or a remark is wrapped between words; one with a word that is
    too long for its column is a footnote.
    """
    return _Layout(grid, max(width, LEAST_WIDTH)).parts()


class _Layout:
    def __init__(self, grid: Grid, width: int) -> None:
        self.grid = grid
        self.width = width
        self.cells = [[column.text(value) for column, value in zip(grid.columns, row.values, strict=True)] for row in grid.rows]
        held = zip_longest(*self.cells, fillvalue="") if self.cells else [()] * len(grid.columns)
        self.headings = [_narrowed(column.heading) for column in grid.columns]
        self.widths = [_widest([*cells, *heading.split("\n")]) for cells, heading in zip(held, self.headings, strict=True)]
        self.names = _widest([grid.heading, *(row.name for row in grid.rows)])
        self.remarks = 0 if grid.remarks is None else _widest([grid.remarks, *(row.remark for row in grid.rows)])
        self.footnotes: dict[str, int] = {}

    def parts(self) -> list[Table | Text]:
        grid = self.grid
        title = [Text(line, style="italic") for line in textwrap.wrap(grid.title, self.width, break_long_words=False)]
        room = self.width - EDGES - sum(1 + width for width in self.widths)
        name, remark = min(self.names, NAME_WIDTH), min(self.remarks, REMARK_WIDTH)
        every = range(len(grid.columns))
        if name + (1 + remark if remark else 0) <= room:
            name = min(self.names, room - (1 + remark if remark else 0))
            bands = [self._band(every, name, room - 1 - name if remark else 0)]
        else:
            name = min(name, max(FOOTNOTE_WIDTH, self.width - EDGES - 1 - max(self.widths, default=0)))
            shown = [grid.heading, *(line for row in grid.rows for line in self._fitted(row.name, name).split("\n"))]
            room = self.width - EDGES - _widest(shown)
            bands = [self._band(band, name, 0) for band in self._bands(room)]
            if remark:
                bands.append(self._band([], name, room - 1))
        notes = [Text(f"  [{number}] {text}") for text, number in self.footnotes.items()]
        return [*title, *bands, *notes]

    def _bands(self, room: int) -> list[list[int]]:
        """Return the columns of each band, as many as fit beside the name."""
        bands: list[list[int]] = []
        left = 0
        for index, width in enumerate(self.widths):
            if not bands or width + 1 > left:
                bands.append([])
                left = room
            bands[-1].append(index)
            left -= width + 1
        return bands

    def _band(self, columns: Sequence[int], name: int, remark: int) -> Table:
        """Return a table of some columns, with names and remarks of so many columns; 0: no remarks."""
        grid = self.grid
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
        table.add_column(grid.heading, no_wrap=True)
        for index in columns:
            column = grid.columns[index]
            table.add_column(self.headings[index], justify="left" if column.words else "right", no_wrap=True)
        if remark:
            table.add_column(_narrowed(grid.remarks or ""), no_wrap=True)
        for row, texts in zip(grid.rows, self.cells, strict=True):
            cells = [Text(texts[index], style=grid.colours.get(texts[index], "")) for index in columns]
            remarks = [Text(self._fitted(row.remark, remark))] if remark else []
            table.add_row(Text(self._fitted(row.name, name)), *cells, *remarks, style=row.style)
        return table

    def _fitted(self, text: str, width: int) -> str:
        """Return a text wrapped between its words, or the number of the footnote that it becomes."""
        if len(text) <= width:
            return text
        if max(map(len, text.split())) <= width:
            return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        return f"[{self.footnotes.setdefault(text, len(self.footnotes) + 1)}]"


def _widest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _narrowed(heading: str) -> str:
    """Return a heading with its long lines wrapped between words."""
    lines = (textwrap.wrap(line, CELL_WIDTH, break_long_words=False, break_on_hyphens=False) for line in heading.split("\n"))
    return "\n".join(part for wrapped in lines for part in wrapped)
