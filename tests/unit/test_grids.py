"""Tables at any width: no number is cut or wrapped, names wrap or become footnotes."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from judged_candidates import judged_candidate
from rich.console import Console

from pipeline.terminal import tables
from pipeline.terminal.grids import Column, Grid, Row, lay_out


def shown(grid: Grid, width: int) -> str:
    console = Console(file=io.StringIO(), width=max(width, 40), highlight=False)
    console.print(*lay_out(grid, width), sep="\n", crop=False)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def check(grid: Grid, width: int) -> str:
    """Check a grid in so many columns: every number and word whole, no line too long."""
    text = shown(grid, width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(len(line) <= width for line in text.splitlines()), text
    tokens = text.split()
    for row in grid.rows:
        for column, value in zip(grid.columns, row.values, strict=True):
            for part in column.text(value).split():
                assert part in tokens, f"{part!r} is cut at {width}:\n{text}"
    letters = Counter("".join(tokens))
    assert all(not Counter("".join(f"{row.name}{row.remark}".split())) - letters for row in grid.rows), "names are whole"
    return text


@given(
    st.lists(
        st.tuples(
            st.text("abc_= ", min_size=1, max_size=80).filter(str.strip),
            st.lists(st.one_of(st.floats(), st.integers(-(2**63), 2**63), st.none()), min_size=6, max_size=6),
        ),
        max_size=5,
    ),
    st.integers(40, 250),
)
def test_no_numbers_and_names_are_too_long(rows: list[tuple[str, list[Any]]], width: int) -> None:
    columns = [Column(f"c{i}", f"column\n{i}", form) for i, form in enumerate((",", ".3f", ".1e", ".4g", ",", ".0f"))]
    check(Grid("numbers", "policy", columns, [Row(" ".join(name.split()), values) for name, values in rows]), width)


def test_records_hold_the_values_themselves(tmp_path: Path) -> None:
    metrics = {
        "memory/kib_per_token": 123456.789,
        "perf/decode_tokens_per_s_slow": 1134567.0,
        "perf/decode_tokens_per_s_fast": 1334567.0,
    }
    baseline, first = tables.comparison([judged_candidate(tmp_path, "fp8", metrics=metrics)]).records()
    assert first["policy"] == "fp8"
    assert first["kib_per_token"] == 123456.789
    assert first["decode_tokens_per_s_range"] == (1134567.0, 1334567.0)
    assert baseline["accuracy"] is None
