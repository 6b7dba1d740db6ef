"""The tables printed at the end of a run."""

import io
import re
from pathlib import Path

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import answered, sliced, verdict
from rich.console import Console

from pipeline.cli.console import Column, Grid, Value
from pipeline.cli.tables import comparison, print_verdict
from stages.verdict.candidate import Candidate, not_passed
from stages.verdict.verdict import Check, Gate


def test_a_verdict_begins_with_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = answered("copy", 64, lost=1, candidate_probability=0.252)
    metrics = sliced(rows).metrics | {"memory/kib_per_token": 1.0, "baseline/kib_per_token": 2.0}
    judged = judged_candidate(tmp_path, "fp8", metrics=metrics).model_copy(update=Candidate.decided(verdict(rows)))
    print_verdict(judged)
    first = " ".join(capsys.readouterr().out.split())
    assert re.fullmatch(
        r"PASS fp8: keeps 100\.8 % of the probability of right answers \(at least 100\.4 %\); right answers 0\.984, of FP16 "
        r"1\.000; mean KL 0\.0e\+00 "
        r"1\.000 KiB/token, FP16 2\.000: the same memory holds 2\.00 times the tokens "
        r"with so few documents, up to 6\.4 % of requests may be ruined",
        first,
    )
    grid = comparison([judged])
    assert [column.heading for column in grid.columns][:3] == ["policy", "verdict", "recovery"]
    assert [row[2] for row in grid.rows] == ["1", pytest.approx(1.008)]


@pytest.mark.parametrize(
    ("bound", "remark"), [(0.299, "with so few documents, up to 30 % of requests may be ruined"), (0.024, None), (None, None)]
)
def test_a_pass_on_few_questions_says_what_it_leaves_open(
    bound: float | None, remark: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Check(gate=Gate.RUINED, where="all", value=0.0, bound=bound, threshold=0.025, status="PASS", reason="none")
    passed = judged_candidate(tmp_path, "fp8", metrics={}).model_copy(update={"checks": (line,)})
    assert (passed.caveat, repr(passed)) == (remark, "Candidate(fp8 of tiny: PASS)")
    print_verdict(passed)
    assert (f"\n  {remark}\n" in capsys.readouterr().out) == (remark is not None)
    assert passed.model_copy(update={"verdict": "FAIL"}).caveat is None


COLUMNS = [Column("policy"), *(Column(f"column\n{i}", form) for i, form in enumerate((",", ".3f", ".1e"))), Column("why")]
ROWS: list[list[Value]] = [
    ["int4_streaming kv.sink_tokens=4", 2**63, 123456.789, 1e-9, "a remark of several words that wraps"],
    ["fp8", 1, float("nan"), None, ""],
]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_are_whole_and_names_and_remarks_wrap(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(Grid("numbers", COLUMNS, ROWS).table(width), crop=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert {"9,223,372,036,854,775,808", "123456.789", "1.0e-09"} <= set(text.split())
    assert {"remark", "several", "wraps", "-"} <= set(text.split())


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("candidate", "does not compute its policy"),
        ("baseline", "cannot be compared, because the FP16 baseline deviates from the reference engine"),
        ("control", "gives answers that do not depend on the cache"),
    ],
)
def test_an_engines_own_fault_is_not_blamed_on_its_cache(where: str, message: str) -> None:
    gate = Gate.MUST_FAIL_CONTROL if where == "control" else Gate.STRESS_TEST
    failed = Check(gate=gate, where=where, value=1.0, threshold=0.0, status="FAIL", reason="batch: a ragged row")
    assert not_passed("fp8", "FAIL", [failed]) == f"fp8 {message}: FAIL"
