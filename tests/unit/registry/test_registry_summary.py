"""summary.json of a sweep: candidates, finished jobs, and the exit code; and junit.xml for CI systems."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from helpers.refusals import refused
from pydantic import ValidationError

from pipeline.evidence.retention import last_sweeps
from pipeline.registry.summary import Summary, begin, finish, last_judged, load, note_champion, record, sweeps, write_junit
from stages.core.errors import UserError
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.verdict import Check, Gate, LineStatus, Status, Verdict

CITED: dict[str, Any] = {
    name: Cited(path=Path(f"/{name}"), digest=name) for name in ("engine", "baseline", "report", "identity")
}
FP8 = Candidate(
    name="fp8", policy="fp8", model="", backend="onnxruntime", verdict="PASS", reasons=(), run_id="run", version="3", **CITED,
    metrics={"quality/kl_mean": 0.1, "memory/kib_per_token": 2.0},
)  # fmt: skip


def fp8(**changes: Any) -> Candidate:
    return FP8.model_copy(update=changes)


def test_a_sweep_merges_by_model_and_name_another_starts_anew(tmp_path: Path) -> None:
    record(tmp_path, "one", FP8)
    record(tmp_path, "one", fp8(name="int8", policy="int8"))
    record(tmp_path, "one", fp8(verdict="FAIL"))
    record(tmp_path, "one", fp8(model="another"))
    note_champion(tmp_path, "int8")
    assert [(c.model, c.name, c.verdict) for c in load(tmp_path).candidates] == [
        ("", "fp8", "FAIL"),
        ("", "int8", "PASS"),
        ("another", "fp8", "PASS"),
    ]
    assert load(tmp_path).champion == "int8"
    second_sweep = record(tmp_path, "two", FP8)
    assert ([c.name for c in second_sweep.candidates], second_sweep.champion) == (["fp8"], None)


def test_a_promotion_from_an_older_sweep_does_not_make_it_the_last_one(tmp_path: Path) -> None:
    begin(tmp_path, "s1", ["fp8", "int8"])
    record(tmp_path, "s1", FP8)
    note_champion(tmp_path, "fp8", "s1")
    assert load(tmp_path) == load(tmp_path, "s1")
    begin(tmp_path, "s2", ["int8", "int4"])
    record(tmp_path, "s2", fp8(name="int8"))
    note_champion(tmp_path, "int8", "s1")
    assert [load(tmp_path, sweep).champion for sweep in (None, "s1", "s2")] == ["int8"] * 3
    assert [item.name for item in load(tmp_path).candidates] == ["int8"]


CHECK = Check(gate=Gate.MEAN_KL, where="copy", value=0.1, bound=None, threshold=0.02, status="FAIL", reason="too far")


def test_a_summary_keeps_candidates_and_the_fields_for_ci(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Candidate.model_validate({**FP8.model_dump(), "metrics": {"quality/kl_mean": float("inf")}})
    verdict = Verdict(status="FAIL", reasons=["far"], checks=[CHECK], warnings=["no fork was exercised"], samples_needed=900)
    for candidate in (fp8(reasons=("a", "b")), fp8(version=""), fp8(**Candidate.decided(verdict))):
        record(tmp_path, "one", candidate)
        assert load(tmp_path).candidates == (candidate,)
    raw = json.loads((tmp_path / "summary.json").read_text())
    assert {"schema_version", "candidates", "champion", "exit_code"} <= raw.keys()
    promised = {"name", "policy", "model", "backend", "verdict", "reasons", "metrics", *CITED}
    assert promised <= raw["candidates"][0].keys()
    assert all(raw["candidates"][0][name].keys() == {"path", "digest"} for name in CITED)


@pytest.mark.parametrize("sweep", ["none", "../summary", "", "a/b"])
def test_other_files_are_ignored_and_a_missing_sweep_is_refused(tmp_path: Path, sweep: str) -> None:
    begin(tmp_path, "monday", ["fp8"])
    for name in (".hidden.json", "monday (conflicted copy).json"):
        (tmp_path / "summaries" / name).write_text("{")
    assert sweeps(tmp_path) == ["monday"]
    assert last_judged(tmp_path, "tiny") is None
    with pytest.raises(UserError, match=r"promote\.sweep=.*: there is no such sweep in .*summaries; give one, such as monday"):
        load(tmp_path, sweep)


def test_concurrent_sweeps_lose_no_candidate(tmp_path: Path) -> None:
    begin(tmp_path, "sweep", ["int8", "fp8"])
    record(tmp_path, "sweep", FP8)
    begin(tmp_path, "beside", ["int4"])
    record(tmp_path, "beside", fp8(name="int4", verdict="FAIL"))
    finish(tmp_path, "beside", 3)
    assert [c.name for c in load(tmp_path).candidates] == ["int4"]
    record(tmp_path, "sweep", fp8(name="int8"))
    finish(tmp_path, "sweep", 0, job=1)
    finish(tmp_path, "sweep", 0, job=2)
    assert load(tmp_path) == load(tmp_path, "sweep")
    assert [c.name for c in load(tmp_path, "sweep").candidates] == ["int8", "fp8"], "in the order of the command line"
    assert (load(tmp_path, "sweep").exit_codes, load(tmp_path, "beside").exit_codes) == ({1: 0, 2: 0}, {1: 3})


def test_a_sweep_has_no_exit_code_before_its_command_ends(tmp_path: Path) -> None:
    begin(tmp_path, "large", ["fp8", *(f"int8 seed={seed}" for seed in range(7))])
    assert str(load(tmp_path).unfinished).endswith("job 4 (int8 seed=2), job 5 (int8 seed=3), 3 more")
    for jobs in (["fp8", "int8"], ["of a later job"]):
        begin(tmp_path, "one", jobs)
    finish(tmp_path, "one", 3, job=1)
    for code in (130, 130):  # a cluster ran it again
        finish(tmp_path, "one", code, job=2)
    assert load(tmp_path).unfinished == "sweep one did not finish: 1 of 2 jobs ended, missing job 2 (int8)"
    finish(tmp_path, "one", 0, job=2)
    ended = load(tmp_path)
    assert (ended.unfinished, ended.exit_code, ended.exit_codes) == (None, None, {1: 3, 2: 0})


def test_a_summary_that_cannot_be_written_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("pipeline.registry.summary.write_atomically", full)
    with refused(
        UserError, f"workdir={tmp_path}: summary.json cannot be written (No space left on device); give a folder that can"
    ):
        record(tmp_path, "one", FP8)


def test_cited_files_of_a_moved_work_directory_are_found(tmp_path: Path) -> None:
    old, new = tmp_path / "artifacts" / "old", tmp_path / "new"
    engine = old / "artifacts" / "engine" / "e"
    engine.mkdir(parents=True)
    record(old, "one", fp8(engine=Cited(path=engine, digest="e")))
    assert load(old).candidates[0].engine.path == engine
    old.rename(new)
    (moved,) = load(new).candidates
    assert moved.engine.path == new / "artifacts" / "engine" / "e"
    assert moved.baseline.path == Path("/baseline"), "a file outside of the work directory"


def test_single_evaluations_do_not_displace_a_sweep() -> None:
    """`prune.keep_sweeps` counts sweeps and single evaluations separately, so single ones never make a sweep prunable."""
    sweep = Summary(sweep="sweep", names=("int8", "fp8"), candidates=(FP8, FP8))
    single = [Summary(sweep=f"single {number}", names=("fp8",), candidates=(FP8,)) for number in range(4)]
    assert [one.sweep for one in last_sweeps([*single, sweep], 3)] == ["single 0", "single 1", "single 2", "sweep"]


CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"skipped", "failure", "error", "system-out"},
}
"""Element -> allowed children, for the used part of the schema of JUnit's reports."""


def check(gate: Gate, status: LineStatus, reason: str = "a reason", where: str = "copy") -> Check:
    return Check(gate=gate, where=where, value=0.1, bound=0.2, threshold=0.3, status=status, reason=reason)


def written(
    folder: Path, *candidates: Candidate, jobs: int = 0, exit_code: int = 0, accepted: tuple[Status, ...] = ("PASS",)
) -> ElementTree.Element:
    """Write a report, check it against the schema, and return its root."""
    last = Summary(sweep="a", names=tuple(map(str, range(jobs))), candidates=candidates, exit_code=exit_code)
    write_junit(folder, last, accepted)
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
    failed = fp8(name="int8", checks=checks, verdict="FAIL", reasons=("4 of 16 answers lost",))
    root = written(tmp_path, fp8(checks=checks[::2]), failed, fp8(name="a", verdict="INCONCLUSIVE"))
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
    undecided, failed = (fp8(name=verdict, verdict=verdict) for verdict in ("INCONCLUSIVE", "FAIL"))
    root = written(tmp_path, undecided, failed, accepted=("PASS", "INCONCLUSIVE"))
    cases = {case.attrib["name"]: [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {"INCONCLUSIVE": ["skipped", "system-out"], "FAIL": ["failure"]}


def test_a_job_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    root = written(tmp_path, FP8, jobs=3, exit_code=4)
    (error,) = root.iter("error")
    assert error.attrib == {"type": "exit code 4", "message": "2 of 3 jobs gave no verdict; the sweep's exit code is 4"}
    assert len(list(written(tmp_path, jobs=1, exit_code=2).iter("error"))) == 1


def test_junit_texts_are_escaped_and_secrets_masked(tmp_path: Path) -> None:
    hostile = "postgresql://me:hunter2@host/db </failure><script> & \x00 \x1b[31m \ud800 \uffff \t\n ü 🎉 ]]>"
    root = written(tmp_path, fp8(checks=[check(Gate.ACCURACY, "FAIL", hostile)], verdict="FAIL"))
    (failure,) = root.iter("failure")
    assert (
        failure.text
        == "FAIL accuracy [copy]: postgresql://***@host/db </failure><script> & \ufffd \ufffd[31m \ufffd \ufffd \t\n ü 🎉 ]]>"
    )
