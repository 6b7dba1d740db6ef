"""Tables: numbers are never cut at any width, and records hold the values."""

import io

import pytest
from rich.console import Console

from pipeline.cli.grids import Column, Grid, Row

COLUMNS = [Column(f"c{i}", f"column\n{i}", form) for i, form in enumerate((",", ".3f", ".1e"))]
ROWS = [
    Row("int4_streaming kv.sink_tokens=4", [2**63, 123456.789, 1e-9], "a remark of several words that wraps"),
    Row("fp8", [1, float("nan"), None]),
]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_are_whole_and_names_and_remarks_wrap(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    grid = Grid("numbers", "policy", COLUMNS, ROWS, remarks="why")
    console.print(grid.table(width), crop=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert {"9,223,372,036,854,775,808", "123456.789", "1.0e-09"} <= set(text.split())
    assert {"remark", "several", "wraps", "-"} <= set(text.split())


def test_records_hold_the_values_themselves() -> None:
    first, second = Grid("numbers", "policy", COLUMNS, ROWS, remarks="why").records()
    assert (first["policy"], first["c1"], first["why"]) == ("int4_streaming kv.sink_tokens=4", 123456.789, ROWS[0].remark)
    assert (second["c0"], second["c1"], second["c2"]) == (1, None, None)
