"""The results of a run: the tables printed at its end, and junit.xml for CI systems."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import answered, sliced, verdict
from rich.console import Console

from pipeline.cli.grids import Column, Grid, Value
from pipeline.cli.junit import write_junit
from pipeline.cli.tables import comparison, print_verdict
from pipeline.registry.summary import Summary
from stages.verdict.candidate import Candidate, not_passed
from stages.verdict.verdict import Check, Gate, LineStatus, Status


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


CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"skipped", "failure", "error", "system-out"},
}
"""Element -> allowed children, for the used part of the schema of JUnit's reports."""


def check(gate: Gate, status: LineStatus, reason: str = "a reason", where: str = "copy") -> Check:
    return Check(gate=gate, where=where, value=0.1, bound=0.2, threshold=0.3, status=status, reason=reason)


def candidate(folder: Path, name: str, *checks: Check, **update: object) -> Candidate:
    return judged_candidate(folder, name, metrics={}).model_copy(update={"checks": checks, **update})


def written(
    folder: Path, *candidates: Candidate, jobs: int = 0, exit_code: int = 0, accepted: tuple[Status, ...] = ("PASS",)
) -> ElementTree.Element:
    """Write a report, check it against the schema, and return its root."""
    last = Summary(sweep="a", names=tuple(map(str, range(jobs))), candidates=candidates, exit_code=exit_code)
    write_junit(folder / "junit.xml", last, accepted)
    root = ElementTree.parse(folder / "junit.xml").getroot()
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    assert all(int(suite.attrib["skipped"]) == len(list(suite.iter("skipped"))) for suite in root)
    for suite in (root, *root.iter("testsuite")):
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            assert int(suite.attrib[count]) == len(list(suite.iter(tag)))
    cases = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(set(cases)) == len(cases), "a CI system tells them apart by their names"
    return root


def test_a_candidate_is_one_test_that_is_red_unless_it_passed(tmp_path: Path) -> None:
    checks = (check(Gate.MEAN_KL, "PASS"), check(Gate.ACCURACY, "FAIL"), check(Gate.RUINED, "WARNING", "not asked"))
    failed = candidate(tmp_path, "int8", *checks, verdict="FAIL", reasons=("4 of 16 answers lost",))
    root = written(tmp_path, candidate(tmp_path, "fp8", *checks[::2]), failed, candidate(tmp_path, "a", verdict="INCONCLUSIVE"))
    cases = {case.attrib["name"]: case for case in root.iter("testcase")}
    failures = {name: case.find("failure") for name, case in cases.items()}
    assert {name: failure is not None and failure.attrib["type"] for name, failure in failures.items()} == {
        "fp8": False, "int8": "FAIL", "a": "INCONCLUSIVE"
    }  # fmt: skip
    failure = failures["int8"]
    assert failure is not None
    assert failure.attrib["message"] == "4 of 16 answers lost"
    assert str(failure.text).splitlines()[1] == "FAIL accuracy [copy]: a reason"
    assert "WARNING max_ruined_share [copy]: not asked" in str(cases["fp8"].findtext("system-out"))


def test_a_quick_check_that_does_not_fail_is_skipped(tmp_path: Path) -> None:
    undecided, failed = (candidate(tmp_path, verdict, verdict=verdict) for verdict in ("INCONCLUSIVE", "FAIL"))
    root = written(tmp_path, undecided, failed, accepted=("PASS", "INCONCLUSIVE"))
    cases = {case.attrib["name"]: [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {"INCONCLUSIVE": ["skipped", "system-out"], "FAIL": ["failure"]}


def test_a_job_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    root = written(tmp_path, candidate(tmp_path, "int8"), jobs=3, exit_code=4)
    (error,) = root.iter("error")
    assert error.attrib == {"type": "exit code 4", "message": "2 of 3 jobs gave no verdict; the sweep's exit code is 4"}
    assert len(list(written(tmp_path, jobs=1, exit_code=2).iter("error"))) == 1


def test_junit_texts_are_escaped_and_secrets_masked(tmp_path: Path) -> None:
    hostile = "postgresql://me:hunter2@host/db </failure><script> & \x00 \x1b[31m \ud800 \uffff \t\n ü 🎉 ]]>"
    root = written(tmp_path, candidate(tmp_path, "int8", check(Gate.ACCURACY, "FAIL", hostile), verdict="FAIL"))
    (failure,) = root.iter("failure")
    assert (
        failure.text
        == "FAIL accuracy [copy]: postgresql://***@host/db </failure><script> & \ufffd \ufffd[31m \ufffd \ufffd \t\n ü 🎉 ]]>"
    )
