"""junit.xml: what a CI system reads of a sweep."""

import re
from pathlib import Path
from xml.etree import ElementTree

from judged_candidates import judged_candidate

from pipeline.registry.summary import Candidate, Summary
from pipeline.terminal.junit import write_junit
from pipeline.verdict.thresholds import Check, LineStatus

CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"failure", "error", "system-out"},
}
"""What the schema of JUnit's reports allows below what, as far as it is used."""


def check(gate: str, status: LineStatus, reason: str = "a reason", where: str = "copy") -> Check:
    return Check(gate=gate, where=where, value=0.1, bound=0.2, threshold=0.3, status=status, reason=reason)


def candidate(folder: Path, name: str, *checks: Check, **update: object) -> Candidate:
    return judged_candidate(folder, name, metrics={}).model_copy(update={"checks": checks, **update})


def written(folder: Path, *candidates: Candidate, jobs: int | None = None, exit_code: int = 0) -> ElementTree.Element:
    """Write a report, hold its form, and return its root."""
    last = Summary(schema_version=1, sweep="a", jobs=jobs, ended=jobs or 0, candidates=candidates, exit_code=exit_code)
    write_junit(folder / "junit.xml", last)
    root = ElementTree.parse(folder / "junit.xml").getroot()
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    for suite in (root, *root.iter("testsuite")):
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            assert int(suite.attrib[count]) == len(list(suite.iter(tag)))
    cases = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(set(cases)) == len(cases), "a CI system tells them apart by their names"
    return root


def outcomes(root: ElementTree.Element) -> dict[str, str]:
    """Name of a case -> the type of its failure, or PASS."""
    return {case.attrib["name"]: (case.find("failure").attrib["type"] if case.find("failure") is not None else "PASS")  # type: ignore[union-attr]
            for case in root.iter("testcase")}  # fmt: skip


def test_each_check_is_a_case_and_what_keeps_from_promoting_is_a_failure(tmp_path: Path) -> None:
    checks = [check("max_mean_kl", "PASS"), check("margin", "FAIL"), check("max_kl_slope", "INCONCLUSIVE", where="all")]
    judged = candidate(tmp_path, "int8", *checks, verdict="FAIL", reasons=("4 of 16 answers lost",))
    root = written(tmp_path, judged)
    assert outcomes(root) == {
        "verdict": "FAIL",
        "max_mean_kl [copy]": "PASS",
        "margin [copy]": "FAIL",
        "max_kl_slope [all]": "INCONCLUSIVE",
    }
    (verdict,) = [case for case in root.iter("testcase") if case.attrib["name"] == "verdict"]
    assert verdict.find("failure").attrib["message"] == "4 of 16 answers lost"  # type: ignore[union-attr]
    assert {case.attrib["classname"] for case in root.iter("testcase")} == {"kvgate.tiny.int8"}


def test_a_warning_is_green_and_says_so(tmp_path: Path) -> None:
    root = written(tmp_path, candidate(tmp_path, "int8", check("max_mean_kl", "WARNING", "not clearly within")))
    assert set(outcomes(root).values()) == {"PASS"}
    assert [output.text for output in root.iter("system-out")][1:] == ["WARNING: not clearly within"]


def test_a_verdict_without_checks_is_never_green_by_itself(tmp_path: Path) -> None:
    """Summaries of before checks were written have none."""
    assert outcomes(written(tmp_path, candidate(tmp_path, "int8", verdict="INCONCLUSIVE"))) == {"verdict": "INCONCLUSIVE"}


def test_a_job_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    root = written(tmp_path, candidate(tmp_path, "int8"), jobs=3, exit_code=4)
    (error,) = root.iter("error")
    assert error.attrib == {"type": "exit code 4", "message": "2 of 3 jobs gave no verdict; the sweep's exit code is 4"}
    assert len(list(written(tmp_path, jobs=1, exit_code=2).iter("error"))) == 1


def test_texts_are_escaped_and_characters_that_xml_forbids_are_replaced(tmp_path: Path) -> None:
    hostile = "</failure><script> & \x00 \x1b[31m \ud800 \uffff \t\n ü 🎉 ]]>"
    root = written(tmp_path, candidate(tmp_path, "int8", check("margin", "FAIL", hostile)))
    (failure,) = root.iter("failure")
    assert failure.text == "FAIL: </failure><script> & \ufffd \ufffd[31m \ufffd \ufffd \t\n ü 🎉 ]]>"
    assert re.sub(r"\s+", " ", failure.attrib["message"]) == re.sub(r"\s+", " ", str(failure.text).removeprefix("FAIL: "))


def test_secrets_are_masked(tmp_path: Path) -> None:
    written(tmp_path, candidate(tmp_path, "int8", check("margin", "FAIL", "postgresql://me:hunter2@host/db")))
    assert "hunter2" not in (tmp_path / "junit.xml").read_text()
