"""Tables with named rows. Terminals show formatted values; log collectors get the raw values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

CELL_WIDTH, INTEGER_WIDTH = 12, 26
"""Maximum characters of a number without an exponent: of floats, and of integers (64 bits with commas fit)."""
NAME_WIDTH, REMARK_WIDTH = 18, 26
"""Minimum columns for names and for remarks, including the box. A table with less space gets wider than the terminal."""

Value = float | str | None


def _known(value: Value) -> bool:
    return value not in (None, "") and not (isinstance(value, float) and not math.isfinite(value))


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of a few fixed words."""

    key: str
    """Name in records."""
    heading: str
    """Heading, possibly with several lines."""
    form: str = ""
    """Format specification of numbers."""
    words: bool = False
    """Whether the column has words, which are aligned left."""

    def text(self, value: Value) -> str:
        """Return a value as text; `-` if it is missing or not finite."""
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "-"
        text = format(value, self.form)
        return text if len(text) <= (INTEGER_WIDTH if isinstance(value, int) else CELL_WIDTH) else format(value, ".2e")


@dataclass(frozen=True)
class Row:
    name: str
    values: Sequence[Value]
    remark: str = ""
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: rows with a name, values and an optional remark."""

    title: str
    heading: str
    """Heading of the names."""
    columns: Sequence[Column]
    rows: Sequence[Row]
    remarks: str | None = None
    """Heading of the remarks; None if no row has one."""
    colours: Mapping[str, str] = field(default_factory=dict)
    """Word -> style of the cells with this word."""

    def records(self) -> list[dict[str, object]]:
        """Return the rows as records by column key; None for values that are empty or not finite."""
        keys = [self.heading, *(column.key for column in self.columns), *([self.remarks] if self.remarks is not None else [])]
        values = [[row.name, *(value if _known(value) else None for value in row.values), row.remark] for row in self.rows]
        return [dict(zip(keys, row, strict=False)) for row in values]

    def texts(self) -> list[list[str]]:
        """Return the table as text: the headings, then the name and the values of every row."""
        rows = [[row.name, *map(Column.text, self.columns, row.values)] for row in self.rows]
        return [[self.heading, *(" ".join(column.heading.split()) for column in self.columns)], *rows]

    def table(self, width: int) -> Table:
        """Return the table for a terminal of `width` columns. Names and remarks wrap; numbers are never truncated."""
        cells = [cells for _, *cells in self.texts()[1:]]
        least = NAME_WIDTH + (REMARK_WIDTH if self.remarks is not None else 0)
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title=self.title or None, title_justify="left")
        table.add_column(self.heading, overflow="fold")
        for index, column in enumerate(self.columns):
            table.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
            least += max(map(len, [*column.heading.split("\n"), *(row[index] for row in cells)])) + 1
        if self.remarks is not None:
            table.add_column(self.remarks, overflow="fold")
        table.width = least if least > width else None
        for row, texts in zip(self.rows, cells, strict=True):
            shown = [Text(text, style=self.colours.get(text, "")) for text in texts]
            table.add_row(Text(row.name), *shown, *([Text(row.remark)] if self.remarks is not None else []), style=row.style)
        return table
