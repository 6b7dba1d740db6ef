"""summary.json of a sweep: candidates, finished jobs, and the exit code."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.refusals import refused
from pydantic import ValidationError

from pipeline.evidence.retention import last_sweeps
from pipeline.registry.summary import Summary, begin, finish, last_judged, load, note_champion, record, sweeps
from stages.core.errors import UserError
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.verdict import Check, Gate, Verdict

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
