"""A small run recovers from a fault at every eightieth operation. KVGATE_EVERY=1 tests every operation, in half an hour.

Only child processes open the tracking store, because MLflow keeps a database open and every trial has a new database file.
"""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from helpers.commands.interruptions import FAULTS, Attempt, Fault, attempt
from helpers.commands.small_runs import RunResult, evaluate, open_tracking

from pipeline.registry import summary

EXIT_CODES: dict[Fault, set[int]] = {"SIGKILL": {-9}, "SIGTERM": {130}, "ENOSPC": {0, 1}, "EIO": {0, 1}}
"""Allowed exit codes of a process with this fault; 0 if only a clean-up failed."""
EVERY = int(os.environ.get("KVGATE_EVERY", "80"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a template of the work directory: an empty store, whose tables take seconds to create."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.safetensors").write_bytes(b"weights")
    created = attempt(lambda: open_tracking(folder / "work").location.exists, folder)
    assert created.code == 0, created.traceback
    (folder / "work").rename(folder / "template")
    return folder


def judge(folder: Path) -> RunResult:
    return evaluate(folder / "work", folder / "model.safetensors", "fp8", "sweep")


def judge_and_check(folder: Path) -> RunResult:
    """Judge one engine; assert that the failed attempt left no files and that the new results are complete."""
    ended, work = judge(folder), folder / "work"
    hidden = [path for path in (work / "artifacts").rglob(".*") if path.is_dir() and path.name not in (".partial", ".files")]
    assert hidden == []
    assert list((work / "artifacts" / ".partial").glob("*/*")) == []
    store = open_tracking(work)
    assert "FINISHED" in {run.info.status for run in store.client.search_runs([store.experiment_id])}
    assert len(store.read().versions) == 1
    last = summary.load(work)
    assert ([candidate.name for candidate in last.candidates], last.exit_codes) == (["fp8"], {1: 0})
    return ended


def attempt_anew(folder: Path, at: int | None = None, fault: Fault = "SIGKILL") -> Attempt:
    """Judge one engine in a new work directory."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    shutil.copytree(folder / "template", folder / "work")
    return attempt(partial(judge, folder), folder / "work", at, fault)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Attempt:
    """A run without a fault."""
    run = attempt_anew(folder)
    assert run.code == 0, run.traceback
    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_recovers_from_a_fault_at_any_operation(fault: Fault, folder: Path, undisturbed: Attempt) -> None:
    for at in range(1 + FAULTS.index(fault) % EVERY, undisturbed.operations + 1, EVERY):
        failed = attempt_anew(folder, at, fault)
        assert failed.code in EXIT_CODES[fault], (at, failed.traceback)
        recovered = attempt(partial(judge_and_check, folder), folder)
        assert recovered.code == 0, (at, recovered.traceback)
        assert recovered.returned == undisturbed.returned, at
