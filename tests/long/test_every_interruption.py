"""A fault at every eightieth operation of a small run. KVGATE_EVERY=1 tests every operation, which takes half an hour."""

import os
import pickle
import shutil
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pytest
from helpers.commands.interruptions import FAULTS, Attempt, Fault, attempt
from helpers.commands.small_runs import Ended, evaluate, open_tracking

from pipeline.registry import summary

ENDS: dict[Fault, set[int]] = {"SIGKILL": {-9}, "SIGTERM": {130}, "ENOSPC": {0, 1}, "EIO": {0, 1}}
"""Allowed exit codes of a child hit by a fault: 0 if only a clean-up failed."""


def run(work: Path, checkpoint: Path) -> None:
    """Judge one engine, and save the result next to the work directory."""
    ended = evaluate(work, checkpoint, "fp8", "sweep")
    work.with_name("ended").write_bytes(pickle.dumps(ended))


def run_and_look(work: Path, checkpoint: Path) -> None:
    """Judge one engine; assert that nothing is left of the failed attempt and that the new results are complete."""
    run(work, checkpoint)
    left = [path for path in (work / "artifacts").rglob(".*") if path.is_dir() and path.name not in (".partial", ".files")]
    assert left == []
    assert list((work / "artifacts" / ".partial").glob("*/*")) == []
    store = open_tracking(work)
    assert {one.info.status for one in store.client.search_runs([store.experiment_id])} <= {"FINISHED", "FAILED", "KILLED"}
    assert len(store.read().versions) == 1
    last = summary.load(work)
    assert ([one.name for one in last.candidates], last.exit_code) == (["fp8"], 0)


@dataclass
class Trials:
    """A folder with a checkpoint and a work directory that is recreated for each trial.

    Only children open the tracking store: MLflow keeps its database open, but every trial has a new database file.
    """

    folder: Path

    @cached_property
    def template(self) -> Path:
        """A work directory with an empty tracking store, whose tables take seconds to create."""
        (self.folder / "model.safetensors").write_bytes(b"weights")
        made = attempt(partial(open_tracking, self.folder / "work"), self.folder)
        assert made.code == 0, made.said
        return (self.folder / "work").rename(self.folder / "template")

    @cached_property
    def undisturbed(self) -> tuple[int, Ended]:
        """Number of operations and result of a run without a fault."""
        self._reset()
        whole = self._attempt()
        assert whole.code == 0, whole.said
        return whole.operations, self._ended()

    def check(self, at: int, fault: Fault) -> None:
        """Fail one operation of a fresh run, then run again."""
        _, expected = self.undisturbed
        self._reset()
        failed = self._attempt(at, fault)
        assert failed.code in ENDS[fault], (at, fault, failed.said)
        recovered = attempt(partial(run_and_look, self.folder / "work", self.folder / "model.safetensors"), self.folder)
        assert recovered.code == 0, (at, fault, recovered.said)
        assert self._ended() == expected, (at, fault)

    def _attempt(self, at: int | None = None, fault: Fault = "SIGKILL") -> Attempt:
        job = partial(run, self.folder / "work", self.folder / "model.safetensors")
        return attempt(job, self.folder / "work", at, fault)

    def _ended(self) -> Ended:
        ended = pickle.loads((self.folder / "ended").read_bytes())
        assert isinstance(ended, Ended)
        return ended

    def _reset(self) -> None:
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        shutil.copytree(self.template, self.folder / "work")
        (self.folder / "ended").unlink(missing_ok=True)


EVERY = int(os.environ.get("KVGATE_EVERY", "80"))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Trials of a small evaluation, each with one fault."""
    return Trials(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_is_recovered_from(fault: Fault, trials: Trials) -> None:
    operations, _ = trials.undisturbed
    for at in range(1 + FAULTS.index(fault) % EVERY, operations + 1, EVERY):
        trials.check(at, fault)
