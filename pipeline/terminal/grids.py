"""Tables of named rows. Rows hold values: a person sees them formatted, a log collector gets them as they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

CELL_WIDTH, INTEGER_WIDTH = 12, 26
"""Characters of the longest number that is written without an exponent. 64 bits with commas fit."""

NAME_WIDTH, REMARK_WIDTH = 18, 26
"""Columns that names and remarks keep, with the box, before a table gets wider than the terminal."""

Value = float | str | None


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of a few fixed words."""

    key: str
    """Its name in records."""
    heading: str
    """May have several lines."""
    form: str = ""
    """Format of its numbers."""
    words: bool = False
    """Whether it holds words, which are aligned left."""

    def text(self, value: Value) -> str:
        """Return a value for people: `-` if it is missing or not finite."""
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
    """Heading of the names."""
    columns: Sequence[Column]
    rows: Sequence[Row]
    remarks: str | None = None
    """Heading of the remarks; None if no row has one."""
    colours: Mapping[str, str] = field(default_factory=dict)
    """Styles of cells that hold these words."""

    def records(self) -> list[dict[str, object]]:
        """Return the rows by the columns' keys; None for values that are empty or not finite."""
        records = []
        for row in self.rows:
            record: dict[str, object] = {self.heading: row.name}
            for column, value in zip(self.columns, row.values, strict=True):
                record[column.key] = None if value == "" or (isinstance(value, float) and not math.isfinite(value)) else value
            if self.remarks is not None:
                record[self.remarks] = row.remark
            records.append(record)
        return records

    def table(self, width: int) -> Table:
        """Return the grid for a terminal of `width` columns. Names and remarks wrap; numbers are never cut."""
        cells = [[column.text(value) for column, value in zip(self.columns, row.values, strict=True)] for row in self.rows]
        numbers = [
            max(map(len, [*column.heading.split("\n"), *(row[index] for row in cells)])) + 1
            for index, column in enumerate(self.columns)
        ]
        least = sum(numbers) + NAME_WIDTH + (REMARK_WIDTH if self.remarks is not None else 0)
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title=self.title or None, title_justify="left")
        table.width = least if least > width else None
        table.add_column(self.heading, overflow="fold")
        for column in self.columns:
            table.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
        if self.remarks is not None:
            table.add_column(self.remarks, overflow="fold")
        for row, texts in zip(self.rows, cells, strict=True):
            shown = [Text(text, style=self.colours.get(text, "")) for text in texts]
            table.add_row(Text(row.name), *shown, *([Text(row.remark)] if self.remarks is not None else []), style=row.style)
        return table
