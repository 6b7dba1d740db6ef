"""Tables of formatted values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

CELL_WIDTH, INTEGER_WIDTH = 12, 26
"""Maximum characters of a float and of an integer; longer numbers get an exponent. 64-bit integers with commas fit."""
TEXT_WIDTH = 18
"""Minimum characters of a text before the text wraps. A table with less space gets wider than the terminal."""

Value = float | str | None


@dataclass(frozen=True)
class Column:
    heading: str
    """Heading, possibly with several lines."""
    form: str = ""
    """Format specification of numbers."""

    def text(self, value: Value) -> str:
        """Return a value as text; `-` if it is missing or not finite."""
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "-"
        text = format(value, self.form)
        return text if len(text) <= (INTEGER_WIDTH if isinstance(value, int) else CELL_WIDTH) else format(value, ".2e")


@dataclass(frozen=True)
class Grid:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    styles: Mapping[str, str] = field(default_factory=dict)
    """Text -> style of the cells with this text."""

    def texts(self) -> list[list[str]]:
        """Return the table as text: the headings, then the rows."""
        headings = [" ".join(column.heading.split()) for column in self.columns]
        return [headings, *([*map(Column.text, self.columns, row)] for row in self.rows)]

    def table(self, width: int) -> Table:
        """Return the table for a terminal of `width` columns. Columns with only texts wrap; numbers are never cut."""
        _, *rows = self.texts()
        title = Text(self.title, "table.title") if self.title else None
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title=title, title_justify="left")
        for index, column in enumerate(self.columns):
            heading, numbers = column.heading, any(isinstance(row[index], int | float) for row in self.rows)
            widest = max(map(len, [*heading.split("\n"), *(row[index] for row in rows)]))
            side: Literal["left", "right"] = "right" if numbers else "left"
            least_width = widest if numbers else min(widest, TEXT_WIDTH)
            table.add_column(heading, justify=side, no_wrap=numbers, overflow="fold", min_width=least_width)
        min_width = sum((column.min_width or 0) + 1 for column in table.columns)
        table.width = min_width if min_width > width else None
        for row in rows:
            table.add_row(*(Text(text, style=self.styles.get(text, "")) for text in row))
        return table
