"""Tables at any width: no number is cut or wrapped, names wrap or become footnotes."""

import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_candidates import judged_candidate
from rich.console import Console

from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.compose import plan
from pipeline.config.policies import shipped_policies
from pipeline.planning.capacity import measure
from pipeline.planning.shapes import read_model
from pipeline.run.tuning import front
from pipeline.terminal import planning_tables, tables
from pipeline.terminal.grids import Column, Grid, Row, lay_out

WIDTHS = (40, 60, 80, 100, 200)
LONG = "fp8k_int4v kv.sink_tokens=4 kv.recent_tokens=64 kv.value.group_size=32 weights=int4_awq seed=12345"
ONE_WORD = "a_policy_whose_name_is_a_single_word_of_seventy_characters_and_then_some"


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


def candidates(folder: Path) -> list[Any]:
    extreme = {
        "memory/kib_per_token": 123456.789,
        "baseline/kib_per_token": 22.5,
        "quality/ppl_ratio": 1.2345e300,
        "quality/kl_mean": 27.5,
        "quality/top10_overlap": 1.0,
        "quality/accuracy_candidate": 0.123,
        "quality/accuracy_baseline": float("nan"),
        "quality/samples": 1e7,
        "perf/decode_tokens_per_s": 1234567.0,
        "baseline/decode_tokens_per_s": 98765.0,
        "perf/decode_tokens_per_s_slow": 1134567.0,
        "perf/decode_tokens_per_s_fast": 1334567.0,
        "quality/acceptance_lookup_candidate": 2.718,
        "quality/acceptance_draft_candidate": 12.34,
    }
    names = ("fp8", LONG, ONE_WORD)
    verdicts = ("PASS", "INCONCLUSIVE", "FAIL")
    return [
        judged_candidate(folder, name, verdict, metrics=extreme)  # type: ignore[arg-type]
        for name, verdict in zip(names, verdicts, strict=True)
    ]


def grids(folder: Path) -> dict[str, Grid]:
    """Every table that kvgate prints, with long names and extreme numbers."""
    config = plan(["stage=capacity", "capacity.concurrency=100000"], multirun=False).jobs[0]
    policies = [*((policy.name, policy) for policy in shipped_policies()), (LONG, shipped_policies()[0])]
    model = read_model(locate_checkpoint(config.model.path))
    capacity = measure(ONE_WORD, model, config.capacity, config.weights.format, policies)
    measured = [
        SimpleNamespace(
            policy=SimpleNamespace(name=name), origin="uniform", on_front=True, bytes_per_token=123456789, kl_sum=1.2e-17,
            kl_check=None, kl_held_out=2.3e5, kl_held_out_upper=float("inf"), beats=[LONG, ONE_WORD],
        )
        for name in ("int8", LONG, ONE_WORD)
    ]  # fmt: skip
    report: Any = SimpleNamespace(measured=measured, chosen="int8", tokens={"for the search": 123456, "held out": 9876543})
    shape: Any = SimpleNamespace(layers=30, kv_heads=3, head_dim=64)
    return {
        "comparison": tables.comparison(candidates(folder)),
        "capacity": planning_tables.capacity_table(capacity),
        "front": front(report, shape),
        "findings": tables.findings_grid(
            "int8", "tiny", folder,
            [
                SimpleNamespace(name="digest of every file", status="same", detail="1,234 files"),  # type: ignore[list-item]
                SimpleNamespace(name="verdict", status="differs", detail=f"was PASS, is FAIL: {LONG} sha256 {'ab12' * 16}"),  # type: ignore[list-item]
            ],
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def every_grid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grid]:
    return grids(tmp_path_factory.mktemp("grids"))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_cuts_a_number(width: int, every_grid: dict[str, Grid]) -> None:
    assert len(every_grid) >= 4
    for grid in every_grid.values():
        check(grid, width)


def test_what_fits_is_one_band(every_grid: dict[str, Grid]) -> None:
    assert shown(every_grid["comparison"], 200).count("verdict") == 1
    assert shown(every_grid["comparison"], 40).count("policy  ") > 1


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


def test_records_hold_the_values_themselves(every_grid: dict[str, Grid]) -> None:
    baseline, first, *_ = every_grid["comparison"].records()
    assert first["policy"] == "fp8"
    assert first["kib_per_token"] == 123456.789
    assert first["decode_tokens_per_s_range"] == (1134567.0, 1334567.0)
    assert baseline["accuracy"] is None, "NaN is no JSON"
