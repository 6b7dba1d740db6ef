"""dry=true writes nothing, shows what jobs make and reuse, lists all problems, and predicts the exit code if it is certain.

The first commands of a new user: too few questions are named before any work, and a quick check exits with 0.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.commands.fake_stages import FakeBackend, use_fake_stages

from pipeline.chain.command import run
from pipeline.chain.dry import preview
from pipeline.cli import console
from pipeline.config.compose import Plan, plan
from pipeline.config.config import STAGES
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.summary import new_sweep
from pipeline.registry.tracking import locate
from stages.core.errors import GateRefusal, MissingRequirement, Refusal, UserError, exit_code
from stages.core.records import Sample
from stages.verdict.gates.checks import too_few
from stages.verdict.verdict import Thresholds

BRIEF, ROUNDS = ["calibration.samples=4", "tracking=none"], ["workloads.rounds=[0.5,1.0]"]
OF_STAGES: dict[str, list[str]] = {
    "verify": ["bundle={identity}"],
    "route": ["routing.routes={{copy: fp8}}"],
    "monitor": ["monitor.snapshot={snapshot}"],
}
"""Required arguments by stage."""


@pytest.fixture(autouse=True)
def _fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_stages(monkeypatch)


def planned(work: Path, *arguments: str, sweeping: bool = False) -> Plan:
    return plan([f"workdir={work}", "dry=true", *ROUNDS, *BRIEF, *arguments], multirun=sweeping)


def run_all(jobs: Plan) -> list[tuple[int, str, bool]]:
    """Run the jobs; return the requested artifacts as (job number, title, whether it was reused)."""
    found: list[tuple[int, str, bool]] = []

    def noted(title: str, _: Path, seconds: float | None) -> None:
        assert console.HANDLER.job is not None
        found.append((console.HANDLER.job.number, title, seconds is None))

    with pytest.MonkeyPatch.context() as patch, suppress(GateRefusal):
        patch.setattr(console, "step", noted)
        run(jobs, new_sweep())
    return found


def said_of(jobs: Plan, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str, bool]]:
    """Return the rows of the table that a dry run prints, in the format of `run_all`."""
    preview(jobs)
    rows = re.findall(r"^ *(\S.*?) +(\d) +(reused|made above|made) *$", capsys.readouterr().out, re.MULTILINE)
    made_titles = set[str]()
    for title, _, state in rows:
        assert state != "made above" or title in made_titles, title
        assert state != "reused" or title not in made_titles, title
        made_titles |= {title} if state == "made" else set()
    return [(int(job), title, state != "made") for title, job, state in rows]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory, quick_stores: None) -> Path:  # noqa: ARG001
    """A work directory after a sweep, with an empty registry and the input files that some stages need."""
    folder = tmp_path_factory.mktemp("dry")
    with pytest.MonkeyPatch.context() as patch:
        use_fake_stages(patch)
        work = folder / "work"
        run_all(plan([f"workdir={work}", *ROUNDS, *BRIEF, "stage=evaluate", "kv=fp8,int4_tensor"], multirun=True))
        MlflowStore(locate(planned(work, "tracking=mlflow").jobs[0].tracking, work, "tiny"))
    snapshot = {"schema_version": 1, "taken_at": "now", "classes": {"default": {"version": "1"}}}
    (folder / "snapshot.json").write_text(json.dumps(snapshot))
    return work


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything below a folder: modification time, and the bytes of files."""
    paths = (folder, *sorted(folder.rglob("*")))
    return {str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_writes_anything(stage: str, used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = next((used / "artifacts" / "identity").glob("[!.]*"))
    files = {"identity": identity, "snapshot": used.parent / "snapshot.json"}
    arguments = [argument.format(**files) for argument in OF_STAGES.get(stage, [])]
    before, here = tree(used.parent), sorted(os.listdir())
    preview(planned(used, f"stage={stage}", "tracking=mlflow", *arguments))
    assert tree(used.parent) == before
    assert sorted(os.listdir()) == here
    assert "nothing was written" in capsys.readouterr().out


def test_a_dry_run_foresees_the_artifacts_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    for overrides in (["kv=fp8,int8"], ["kv=int8,int4"], ["kv=int4", "gates.max_acceptance_loss=0.2"]):
        jobs = planned(work, "stage=evaluate", *overrides, sweeping=True)
        before = work.exists()
        foretold = said_of(jobs, capsys)
        assert work.exists() == before
        taken_steps = run_all(jobs)
        # Second rounds run only if the gates need them, and identities are predicted only if the verdict is known.
        unsure = "2/2", "identity"
        certain = [[step for step in steps if not any(word in step[1] for word in unsure)] for steps in (foretold, taken_steps)]
        assert certain[0] == certain[1]
        rounds = {title for _, title, _ in taken_steps if "2/2" in title}
        assert rounds <= {title for _, title, _ in foretold}


def test_weights_are_quantized_and_extremes_measured_once(tmp_path: Path) -> None:
    """Candidate and baseline differ only in their cache."""
    turned = "kv.key.rotation=hadamard"
    wanted = {"kv=fp8_uncalibrated": 0, "kv=fp8": 1, "kv=fp8_head": 0, f"kv=fp8 kv.name=turned {turned}": 0}
    runs = [run_all(planned(tmp_path, "stage=build", *overrides.split())) for overrides in wanted]
    news = [[title for _, title, reused in job if not reused] for job in runs]
    assert [titles.count("extremes") for titles in news] == list(wanted.values())
    assert [titles.count("weights") for titles in news] == [1, 0, 0, 0]
    judged = run_all(planned(tmp_path, "stage=evaluate", "kv=int8"))
    assert {title for _, title, reused in judged if "weights" in title or "export" in title} == {"weights", "export"}
    assert all(reused for _, title, reused in judged if title in ("weights", "export"))


def test_rounds_run_until_decided_and_baselines_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    load = FakeBackend.load

    def record_bundle(self: FakeBackend, bundle: Path) -> Any:
        opened.append(bundle)
        return load(self, bundle)

    monkeypatch.setattr(FakeBackend, "load", record_bundle)

    def rounds(*overrides: str) -> dict[str, bool]:
        """Return the titles of second rounds -> whether they were reused."""
        opened.clear()
        steps = run_all(planned(tmp_path, "stage=evaluate", *overrides))
        return {title: reused for _, title, reused in steps if title.endswith("/2")}

    assert rounds("kv=fp8") == {"baseline fp16 1/2": False, "round fp8 1/2": False}
    two_rounds = {"baseline fp16 1/2": True, "round int8 1/2": False, "baseline fp16 2/2": False, "round int8 2/2": False}
    assert rounds("kv=int8") == two_rounds
    assert rounds("kv=int8") == dict.fromkeys(two_rounds, True)
    assert opened == []
    candidate_again = {"baseline fp16 1/2": True, "round int8 1/2": False, "baseline fp16 2/2": True, "round int8 2/2": False}
    assert rounds("kv=int8", "kv.sink_tokens=4") == candidate_again
    assert len(opened) == 3, "engine, reference engine, and the engine anew: the first has the must-fail control's fault"
    assert rounds("kv=int4") == {"baseline fp16 1/2": True, "round int4 1/2": False}


def test_every_problem_of_every_job_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: FakeBackend, job: Any) -> None:  # noqa: ARG001
        if job.policy.name == "int8":
            raise MissingRequirement("no GPU for int8")
        if job.policy.name == "int4":
            raise UserError("kv=int4: is not held")

    monkeypatch.setattr(FakeBackend, "check_inputs", refuse)
    jobs = planned(tmp_path / "work", "kv=fp8,int8,int4", "signing.key=nowhere.pem", sweeping=True)
    assert preview(jobs) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert lines[0].startswith("pipeline: error: job 1, 2, 3: signing.key=")
    assert lines[1:] == ["pipeline: error: job 2: no GPU for int8", "pipeline: error: job 3: kv=int4: is not held"]


def test_problems_after_the_inputs_are_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeBackend, "check_runs", Mock(side_effect=MissingRequirement("this machine has no GPU")))
    (tmp_path / "mlflow.db").write_text("no database")
    assert preview(planned(tmp_path / "work", "stage=build")) == 0
    assert preview(planned(tmp_path / "work", "stage=promote")) == 2  # nothing was judged
    assert preview(planned(tmp_path / "work", "stage=evaluate")) == 4
    no_database = ["tracking=mlflow", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"]
    assert preview(planned(tmp_path / "work", "stage=evaluate", *no_database)) == 2
    output = capsys.readouterr().err
    assert "this machine has no GPU" in output
    assert "is not a database" in output


def test_a_verdict_that_is_known_decides_the_exit_code(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview(planned(used, "stage=evaluate", "kv=fp8")) == 0
    assert preview(planned(used, "stage=evaluate", "kv=int4_tensor")) == 3
    assert preview(planned(used, "stage=evaluate", "kv=int4_tensor,fp8", sweeping=True)) == 0
    assert preview(planned(used, "stage=evaluate", "kv=int4_tensor,int8", sweeping=True)) == 0  # int8 may pass
    assert "int4_tensor is not good enough: FAIL" in capsys.readouterr().err


def questions(count: int, documents: int, workload: str = "own") -> list[Sample]:
    return [
        Sample(id=f"{workload}-{i}", workload=workload, reference="b", prompt="a", document=f"{workload}-{i % documents}")
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("samples", "gates", "message"),
    [
        (questions(20, 20), {}, "20 questions, 60 are needed"),
        (questions(60, 60), {}, None),
        (questions(300, 10), {}, "10 documents of own, 15 are needed (60 recommended)"),
        (questions(60, 60) + questions(9, 9, "rare"), {}, "9 documents of rare, 15 are needed (60 recommended)"),
        (questions(300, 100), {"min_samples": 200}, "100 documents of own, 200 are needed"),
        (questions(40, 40), {"max_ruined_share": 0.1}, None),
        (
            questions(40, 10),
            {"max_ruined_share": 0.1},
            "40 questions, 60 are needed (or 39 documents); 10 documents of own, 15 are needed (60 recommended)",
        ),
    ],
)
def test_too_few_questions_for_a_pass_are_known_before_any_work(
    samples: list[Sample], gates: dict[str, float], message: str | None
) -> None:
    expected = None if message is None else f"these questions cannot pass: {message}"
    assert too_few(samples, Thresholds.model_validate(gates)) == expected


def first(work: Path, *arguments: str, sweeping: bool = False) -> Plan:
    return plan([f"workdir={work}", *BRIEF, "workloads.rounds=[1.0]", "stage=evaluate", *arguments], multirun=sweeping)


def run_command(jobs: Plan) -> int:
    """Run a command; return its exit code."""
    try:
        return run(jobs, new_sweep())
    except Refusal as error:
        return exit_code(error)
    finally:
        console.end()


def test_a_dry_run_exits_3_if_few_questions_cannot_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helpers.commands.fake_stages.QUESTIONS", questions(8, 8, "copy"))
    assert preview(first(tmp_path, "kv=int8", "dry=true")) == 3
    output = capsys.readouterr()
    assert "8 copy samples in at most 1 round" in output.out
    line = "these questions cannot pass: 8 questions, 60 are needed; 8 documents of copy, 15 are needed (60 recommended)"
    assert f"workloads: {line}" in output.err
    assert "cannot pass" not in output.out, "the line is printed once"
    assert preview(first(tmp_path, "kv=int8", "dry=true", "workloads.conformance_samples=0")) == 0


def test_a_quick_check_asks_the_users_questions_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "reference": "2"}\n')
    workloads = plan(["experiment=quick", "workloads=jsonl", f"workloads.jsonl={file}"], multirun=False).jobs[0].workloads
    assert (workloads.user_path, workloads.conformance_samples, workloads.rounds) == (file, 0, [1.0])
    assert not any(workloads.samples.values())
    pages = plan(["experiment=quick"], multirun=False).jobs[0].workloads
    assert pages.samples == {"documentation": 0, "lookup": 15, "extraction": 15, "quotation": 15, "recall": 15}


@pytest.mark.parametrize("sweeping", [False, True])
def test_a_finished_quick_check_exits_0_and_never_passes(
    tmp_path: Path, sweeping: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = "kv=int8,fp8_head" if sweeping else "kv=int8"
    assert run_command(first(tmp_path / "quick", "experiment=quick", policies, sweeping=sweeping)) == 0
    output = capsys.readouterr()
    assert "QUICK CHECK int8" in output.out
    assert "never passes" in output.out
    assert "INCONCLUSIVE" not in output.out.partition("KV caches against")[0]
    assert preview(first(tmp_path / "quick", "experiment=quick", policies, sweeping=sweeping)) == 0
    if sweeping:
        return
    assert run_command(first(tmp_path / "own", policies, "workloads.conformance_samples=0")) == 0
    assert run_command(first(tmp_path / "whole", policies, "gates.min_samples=1000")) == 3
    assert run_command(first(tmp_path / "bad", "experiment=quick", "kv=int4_tensor")) == 3, "a quick check can fail a cache"
