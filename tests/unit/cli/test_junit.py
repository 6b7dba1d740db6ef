"""junit.xml: a sweep's results for CI systems."""

from pathlib import Path
from xml.etree import ElementTree

from helpers.registry.candidates import judged_candidate

from pipeline.cli.junit import write_junit
from pipeline.registry.summary import Summary
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Check, Gate, LineStatus, Status

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
