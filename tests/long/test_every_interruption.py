"""A fault at every eightieth operation of a small run. KVGATE_EVERY=1 tests every operation, which takes half an hour.

Only children open the tracking store: MLflow keeps its database open, but every trial has a new database file.
"""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from helpers.commands.interruptions import FAULTS, Attempt, Fault, attempt
from helpers.commands.small_runs import RunResult, evaluate, open_tracking

from pipeline.registry import summary

ENDS: dict[Fault, set[int]] = {"SIGKILL": {-9}, "SIGTERM": {130}, "ENOSPC": {0, 1}, "EIO": {0, 1}}
"""Allowed exit codes of a child hit by a fault: 0 if only a clean-up failed."""
EVERY = int(os.environ.get("KVGATE_EVERY", "80"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a template of the work directory: an empty store, whose tables take seconds to create."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.safetensors").write_bytes(b"weights")
    made = attempt(lambda: open_tracking(folder / "work").location.exists, folder)
    assert made.code == 0, made.traceback
    (folder / "work").rename(folder / "template")
    return folder


def judge(folder: Path) -> RunResult:
    return evaluate(folder / "work", folder / "model.safetensors", "fp8", "sweep")


def judge_and_look(folder: Path) -> RunResult:
    """Judge one engine; assert that nothing is left of the failed attempt and that the new results are complete."""
    ended, work = judge(folder), folder / "work"
    left = [path for path in (work / "artifacts").rglob(".*") if path.is_dir() and path.name not in (".partial", ".files")]
    assert left == []
    assert list((work / "artifacts" / ".partial").glob("*/*")) == []
    store = open_tracking(work)
    assert {one.info.status for one in store.client.search_runs([store.experiment_id])} <= {"FINISHED", "FAILED", "KILLED"}
    assert len(store.read().versions) == 1
    last = summary.load(work)
    assert ([one.name for one in last.candidates], last.exit_code) == (["fp8"], 0)
    return ended


def attempt_anew(folder: Path, at: int | None = None, fault: Fault = "SIGKILL") -> Attempt:
    """Judge one engine in a new work directory."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    shutil.copytree(folder / "template", folder / "work")
    return attempt(partial(judge, folder), folder / "work", at, fault)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Attempt:
    """A run without a fault."""
    whole = attempt_anew(folder)
    assert whole.code == 0, whole.traceback
    return whole


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_is_recovered_from(fault: Fault, folder: Path, undisturbed: Attempt) -> None:
    for at in range(1 + FAULTS.index(fault) % EVERY, undisturbed.operations + 1, EVERY):
        failed = attempt_anew(folder, at, fault)
        assert failed.code in ENDS[fault], (at, failed.traceback)
        recovered = attempt(partial(judge_and_look, folder), folder)
        assert recovered.code == 0, (at, recovered.traceback)
        assert recovered.returned == undisturbed.returned, at
