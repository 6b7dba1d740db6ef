"""Promotion against a real SQLite store, and what several processes do to one."""

import multiprocessing
import sqlite3
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
from judged_candidates import decide_pass, judged_candidate, proven, replay_without_findings

from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry import promotion
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.summary import Candidate, load, note, record
from pipeline.registry.tracking import Tracking, locate
from pipeline.trust.movelog import MoveLog

FORK = multiprocessing.get_context("fork")
"""Forked children have MLflow imported already: importing takes 2 s in each."""
PROCESSES = 4


def open_in(work: Path, name: str = "kvgate") -> MlflowStore:
    """An experiment of its own in the work directory's store: making a new store takes seconds."""
    return MlflowStore(locate(Tracking(experiment=name), work, name, {}))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def judge(work: Path, kv: str, kib: float) -> Candidate:
    metrics = {"quality/kl_mean": 0.01, "memory/kib_per_token": kib, "memory/max_live_tokens": 1e6 / kib}
    return judged_candidate(work, kv, metrics=metrics)


def sweep(store: MlflowStore, work: Path, name: str, **kib: float) -> None:
    for kv, size in kib.items():
        with store.candidate(name, kv, "onnxruntime", {}) as run:
            done = store.conclude(run, judge(work, kv, size))
        record(work, name, done)


def promote_last(store: MlflowStore, work: Path, name: str | None = None) -> promotion.Move:
    summary = load(work)
    move = promotion.promote(
        summary.candidates, MoveLog(store), replay_without_findings, decide_pass, sweep=summary.sweep, name=name
    )
    note(work, None, champion=move.champion)
    return move


def _register_one(work: Path, number: int, results: "Queue[str]") -> None:
    """Open the store, which does not exist yet, and register an engine of its own."""
    store = open_in(work, "together")
    with store.candidate("together", f"kv{number}", "onnxruntime", {}) as run:
        done = store.conclude(run, judge(work, f"kv{number}", 1.0 + number))
    record(work, "together", done)
    assert done.registration is not None
    results.put(done.registration.model_version)


def test_processes_that_open_a_fresh_store_at_once_all_get_through(work: Path) -> None:
    assert not (work / "mlflow.db").exists(), "this test comes first in the module: it makes the store"
    for number in range(PROCESSES):
        judge(work, f"kv{number}", 1.0)
    results: Queue[str] = FORK.Queue()
    workers = [FORK.Process(target=_register_one, args=(work, n, results)) for n in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert sorted(results.get(timeout=1) for _ in workers) == [str(n + 1) for n in range(PROCESSES)]
    assert len(load(work).candidates) == PROCESSES
    with sqlite3.connect(work / "mlflow.db") as database:
        assert database.execute("select count(*) from experiments where name = 'together'").fetchone() == (1,)
        assert database.execute("select count(*) from runs where status = 'FINISHED'").fetchone() == (PROCESSES,)
    assert promote_last(open_in(work, "together"), work).champion == "kv0"


def test_sweeps_promote_roll_back_and_refuse_tampered_engines(work: Path) -> None:
    store = open_in(work, "promote")
    assert store.alias("champion") is None
    sweep(store, work, "monday", fp8=2.0, int8=2.06)
    first = promote_last(store, work)
    assert first.champion == "fp8"
    assert load(work).champion == "fp8"

    assert not promote_last(store, work).changed

    sweep(store, work, "tuesday", fp8=2.0, fp8k_int4v=1.56)
    second = promote_last(store, work)
    assert (second.champion, second.previous) == ("fp8k_int4v", first.version)
    assert (store.alias("champion"), store.alias("previous")) == (second.version, first.version)
    tags = store.tags(second.version)
    assert tags is not None
    assert tags["promoted_by_sweep"] == "tuesday"

    back = promotion.rollback(MoveLog(store), proven)
    assert (back.champion, back.version) == ("fp8", first.version)
    assert (store.alias("champion"), store.alias("previous")) == (first.version, None)
    with pytest.raises(UserError, match="no previous champion"):
        promotion.rollback(MoveLog(store), proven)

    assert promote_last(store, work).version == first.version, "what was rolled back stays back"
    history = MoveLog(store).read()
    assert [record.kind for record in history.records] == ["promote", "promote", "rollback"]
    assert history.problem is None
    store.set_alias("champion", second.version)  # by hand
    MoveLog(store).repair()
    assert store.alias("champion") == first.version

    (work / "engines" / "fp8k_int4v" / "bundle.json").write_text("tampered")
    with pytest.raises(GateRefusal, match="fp8k_int4v is not promoted: its engine"):
        promote_last(store, work, "fp8k_int4v")
    assert store.alias("champion") == first.version
    assert store.tags("99") is None
