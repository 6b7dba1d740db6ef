"""dry=true as a command: it writes nothing, lists every problem of every job, and ends with the code that is certain."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest
from dry_runs import happened
from fake_stages import FakeBackend, use_fake_stages

from pipeline.config.compose import Plan, plan
from pipeline.config.config import Stage
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.dry import ahead
from pipeline.dry.command import foretell
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.tracking import locate
from pipeline.run.runner import run
from pipeline.terminal import console

BRIEF = ["calibration.samples=4", "workloads.rounds=[0.5,1.0]", "tracking=none"]
TUNING = ["stage=tune", "tune.policies=[fp16,fp8]"]
OF_STAGES: dict[str, list[str]] = {
    "verify": ["bundle={identity}"],
    "route": ["routing.file={routes}"],
    "monitor": ["monitor.snapshot={snapshot}"],
    "tune": TUNING,
}
"""Arguments that a stage cannot do without."""


@pytest.fixture(autouse=True)
def _fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_stages(monkeypatch)


def planned(work: Path, *arguments: str, sweeping: bool = False) -> Plan:
    return plan([f"workdir={work}", "dry=true", *BRIEF, *arguments], multirun=sweeping)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory after a sweep, with an empty registry, and files for the stages that take some."""
    folder = tmp_path_factory.mktemp("dry")
    with pytest.MonkeyPatch.context() as patch:
        use_fake_stages(patch)
        work = folder / "work"
        happened(plan([f"workdir={work}", *BRIEF, "stage=evaluate", "kv=fp8,int4_tensor"], multirun=True))
        MlflowStore(locate(planned(work, "tracking=mlflow").jobs[0].tracking, work, "tiny"))
    (folder / "routes.yaml").write_text("default: {policy: fp8}\n")
    snapshot = {"schema_version": 1, "taken_at": "now", "classes": {"default": {"version": "1"}}}
    (folder / "snapshot.json").write_text(json.dumps(snapshot))
    return work


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: when it was written, and the bytes of files."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (path.lstat().st_mtime_ns, content)
    return found


@pytest.mark.parametrize("stage", get_args(Stage))
def test_no_stage_writes_anything(stage: str, used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = next((used / "artifacts" / "identity").glob("[!.]*"))
    files = {"identity": identity, "routes": used.parent / "routes.yaml", "snapshot": used.parent / "snapshot.json"}
    arguments = [argument.format(**files) for argument in OF_STAGES.get(stage, [])]
    before, here = tree(used.parent), sorted(os.listdir())
    foretell(planned(used, f"stage={stage}", "tracking=mlflow", *arguments))
    assert tree(used.parent) == before
    assert sorted(os.listdir()) == here
    assert "nothing was written" in capsys.readouterr().out


def test_a_sweep_in_a_new_work_directory_leaves_it_unmade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = planned(tmp_path / "work", "kv=fp8,int8", "tracking=mlflow", sweeping=True)
    assert foretell(jobs) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "job 2: all int8" in said
    assert "made by job 1" in said
    assert "time: unknown" in said
    assert "nothing tells" in said


def test_a_work_directory_that_may_not_be_written_to_is_a_problem_and_no_reason_to_say_less(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    access = os.access

    def read_only(path: Any, mode: int) -> bool:
        return not (mode & os.W_OK and str(path).startswith(str(used))) and access(path, mode)

    monkeypatch.setattr(os, "access", read_only)
    assert foretell(planned(used, "stage=evaluate", "kv=int8")) == 4
    said = capsys.readouterr()
    assert "cannot be written to" in said.err
    assert "round int8 1/2" in said.out


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
    assert foretell(jobs) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert lines[0].startswith("pipeline: error: job 1, 2, 3: signing.key=")
    assert lines[1:] == ["pipeline: error: job 2: no GPU for int8", "pipeline: error: job 3: kv=int4: is not held"]


def test_the_configurations_of_all_jobs_are_checked_before_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, "gates.margin=-1,0.1,-2", sweeping=True)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["gates.margin", "gates.margin"]


def test_an_engine_that_can_be_built_and_not_run_is_found_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu(self: FakeBackend) -> None:  # noqa: ARG001
        raise MissingRequirement("this machine has no GPU")

    monkeypatch.setattr(FakeBackend, "check_runs", no_gpu)
    assert foretell(planned(tmp_path / "work", "stage=build")) == 0
    assert foretell(planned(tmp_path / "work", "stage=evaluate")) == 4
    assert "this machine has no GPU" in capsys.readouterr().err


def test_a_store_that_is_none_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlflow.db").write_text("no database")
    jobs = planned(tmp_path / "work", "tracking=mlflow", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}")
    assert foretell(jobs) == 2
    assert "is no SQLite database" in capsys.readouterr().err


def test_what_the_disk_does_not_hold_in_all_is_a_problem(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert foretell(planned(used, "stage=evaluate", "kv=int8,int4", sweeping=True)) == 4
    assert "the artifacts of this command take" in capsys.readouterr().err


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for module in ("mlflow_store", "mlflow_client"):
        monkeypatch.delitem(sys.modules, f"pipeline.registry.{module}", raising=False)


@pytest.mark.usefixtures("no_mlflow")
def test_without_mlflow_a_run_and_its_dry_run_say_that_it_is_missing(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = planned(used, "stage=evaluate", "kv=int8", "tracking=mlflow")
    assert foretell(jobs) == 4
    assert "needs mlflow, which is not installed here" in capsys.readouterr().err
    with pytest.raises(MissingRequirement, match="needs mlflow, which is not installed here"):
        run(jobs.jobs[0], "20260101-000000-1-a")


def test_more_threads_than_processors_are_said(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foretell(planned(used, "stage=evaluate", "kv=int8", "backend.threads=64"))
    threads = capsys.readouterr().out.count("backend.threads=64: this machine has")
    assert threads == (1 if (os.cpu_count() or 1) < 64 else 0)


def test_more_memory_at_once_than_the_machine_has_is_a_problem_and_more_than_is_free_is_said(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = planned(used, "stage=evaluate", "kv=int8")
    assert foretell(jobs) == 0
    said = capsys.readouterr().out
    assert "peak memory: " in said
    assert "memory available now" in said
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**12, available=1000))
    assert foretell(jobs) == 0
    assert "peak memory: that is more than is available now" in capsys.readouterr().out
    monkeypatch.setattr(ahead, "all_memory", lambda: 20_000_000)
    assert foretell(jobs) == 4
    assert "making these artifacts takes" in capsys.readouterr().err


def test_a_verdict_that_is_known_decides_the_exit_code(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foretell(planned(used, "stage=evaluate", "kv=fp8")) == 0
    assert foretell(planned(used, "stage=evaluate", "kv=int4_tensor")) == 3
    assert foretell(planned(used, "stage=evaluate", "kv=int4_tensor,fp8", sweeping=True)) == 0
    assert foretell(planned(used, "stage=evaluate", "kv=int4_tensor,int8", sweeping=True)) == 0  # int8 may pass
    assert "int4_tensor is not good enough: FAIL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["stage=promote"], 2, "no candidates of model other"),
        (["stage=promote", "promote.sweep=20200101-000000-1-ab"], 2, "there is no such sweep"),
        (["stage=rollback"], 2, "there is no previous champion"),
        (["stage=rollback", "tracking=none"], 2, "needs the registry"),
        (["stage=recommend"], 3, "no policy has evidence that covers this use"),
    ],
)
def test_stages_that_move_aliases_are_refused_as_they_would_be(
    arguments: list[str], code: int, message: str, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["model.path=/nowhere/other"] if "promote" in arguments[0] else []
    assert foretell(planned(used, "tracking=mlflow", *model, *arguments)) == code
    assert message in capsys.readouterr().err


def test_the_table_fits_a_narrow_terminal(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "_width", 80)
    with console.out.capture() as captured:
        foretell(planned(used, "stage=evaluate", "kv=int4_hadamard", "kv.name=a_policy_with_a_long_name_of_its_own"))
    table = captured.get().partition("─")[2].partition("\n\n")[0]
    assert "round" in table
    assert max(len(line.rstrip()) for line in captured.get().splitlines() if "│" in line or "made" in line) <= 80
