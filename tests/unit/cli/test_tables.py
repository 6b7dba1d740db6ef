"""The tables printed at the end of a run: columns, values, and numbers that no width cuts."""

import io
import re
from pathlib import Path

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import answered, sliced, verdict
from rich.console import Console

from pipeline.cli.grids import Column, Grid, Value
from pipeline.cli.tables import comparison, print_verdict, reasons_against
from pipeline.registry.promotion import PromotionMove
from stages.verdict.candidate import Candidate, not_passed
from stages.verdict.thresholds import Check, Gate

UNGRADED = {"quality/accuracy_baseline": 0.9}


def test_a_verdict_begins_with_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = answered("copy", 64, lost=1, candidate_probability=0.252)
    metrics = sliced(rows).metrics | {"memory/kib_per_token": 1.0, "baseline/kib_per_token": 2.0}
    judged = judged_candidate(tmp_path, "fp8", metrics=metrics).model_copy(update=Candidate.decided(verdict(rows)))
    print_verdict(judged)
    first = " ".join(capsys.readouterr().out.split())
    assert re.fullmatch(
        r"PASS fp8: keeps 100\.8 % of the probability of right answers \(at least 100\.4 %\); right answers 0\.984, of FP16 "
        r"1\.000; mean KL 0\.0e\+00 "
        r"1\.000 KiB/token, FP16 2\.000: the same memory holds 2\.00 times the tokens",
        first,
    )
    grid = comparison([judged])
    assert [column.key for column in grid.columns][:3] == ["policy", "verdict", "recovery"]
    assert [row[2] for row in grid.rows] == ["1", pytest.approx(1.008)]


@pytest.mark.parametrize(("bound", "remark"), [(0.299, "exclude that 30 % of requests are ruined"), (0.085, ""), (None, "")])
def test_a_pass_on_few_documents_says_what_it_leaves_open(bound: float | None, remark: str, tmp_path: Path) -> None:
    line = Check(gate=Gate.RUINED, where="all", value=0.0, bound=bound, threshold=0.025, status="PASS", reason="none")
    passed = judged_candidate(tmp_path, "fp8", metrics={}).model_copy(update={"checks": (line,)})
    assert remark in (passed.caveat or "")
    assert (passed.caveat is None) == (remark == "")
    assert passed.model_copy(update={"verdict": "FAIL"}).caveat is None


def test_an_undecided_verdict_names_the_number_of_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided = Candidate.decided(verdict(answered("copy", 8))) | {"samples_needed": {"copy": 60}}
    print_verdict(judged_candidate(tmp_path, "fp8", metrics={"quality/samples": 8}).model_copy(update=decided))
    output = capsys.readouterr().out
    assert output.startswith("INCONCLUSIVE fp8: 8 questions are too few to decide; ask about 60 of copy\n")
    assert len(output.splitlines()) <= 4


def test_a_blind_verdict_says_that_the_cache_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unseen = Check(gate=Gate.MUST_FAIL_CONTROL, where="control", value=0.0, threshold=1.0, status="FAIL", reason="unnoticed")
    print_verdict(judged_candidate(tmp_path, "fp8", "FAIL", metrics={}).model_copy(update={"checks": (unseen,)}))
    assert "why: the answers do not depend on the cache; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "kl", "message"),
    [("torch", 1e-3, "the reference engine serves only if"), ("onnxruntime", 3e-3, "not lower (3.0e-03 against 2.0e-03)")],
)
def test_the_reason_against_a_passed_candidate_is_the_decision(backend: str, kl: float, message: str, tmp_path: Path) -> None:
    champion, other = (judged_candidate(tmp_path, n, metrics={"quality/kl_mean": v}) for n, v in (("int8", 2e-3), ("fp8", kl)))
    passed = [champion, other.model_copy(update={"backend": backend})]
    assert message in reasons_against(passed, PromotionMove("int8", ""))["fp8"]


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


@pytest.mark.parametrize(
    ("metrics", "key", "shown"),
    [
        ({"quality/acceptance_lookup_candidate": 2.718}, "acceptance_lookup", "2.72"),
        ({"perf/decode_tokens_per_s": 3024.6}, "decode_tokens_per_s", "3025"),
    ],
)
def test_a_figure_of_some_candidates_is_a_column_with_gaps(
    metrics: dict[str, float], key: str, shown: str, tmp_path: Path
) -> None:
    without = judged_candidate(tmp_path, "int8", metrics=UNGRADED)
    grid = comparison([without, judged_candidate(tmp_path, "fp8", metrics=metrics)])
    place = [column.key for column in grid.columns].index(key)
    cells = {row[0]: grid.columns[place].text(row[place]) for row in grid.rows}
    assert (cells["fp8"], cells["int8"]) == (shown, "-")
    assert (key in [column.key for column in comparison([without]).columns]) == (key == "decode_tokens_per_s")


COLUMNS = [
    Column("policy"),
    *(Column(f"c{i}", f"column\n{i}", form) for i, form in enumerate((",", ".3f", ".1e"))),
    Column("why"),
]
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
