"""Processes that begin at once in a work directory without a store: each registers its engine, and the best is promoted."""

import multiprocessing
import sqlite3
from multiprocessing.queues import Queue
from pathlib import Path

from judged_candidates import decide_pass, judged_candidate, replay_without_findings

from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.promotion import promote
from pipeline.registry.summary import load, record
from pipeline.registry.tracking import Tracking, locate
from pipeline.trust.movelog import MoveLog

FORK = multiprocessing.get_context("fork")
"""Forked children have MLflow imported already: importing takes 2 s in each."""
PROCESSES = 4


def open_in(work: Path) -> MlflowStore:
    return MlflowStore(locate(Tracking(experiment="together"), work, "together", {}))


def _register_one(work: Path, number: int, results: "Queue[str]") -> None:
    store, policy = open_in(work), f"kv{number}"
    with store.candidate("together", policy, "onnxruntime", {}) as run:
        metrics = {"quality/kl_mean": 0.01, "memory/max_live_tokens": 1e6 / (1 + number)}
        done = store.conclude(run, judged_candidate(work, policy, metrics=metrics))
    record(work, "together", done)
    results.put(done.version)


def test_processes_that_open_a_fresh_store_at_once_all_get_through(tmp_path: Path) -> None:
    for number in range(PROCESSES):
        judged_candidate(tmp_path, f"kv{number}", metrics={})
    results: Queue[str] = FORK.Queue()
    workers = [FORK.Process(target=_register_one, args=(tmp_path, n, results)) for n in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert sorted(results.get(timeout=1) for _ in workers) == [str(n + 1) for n in range(PROCESSES)]
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select count(*) from experiments where name = 'together'").fetchone() == (1,)
        assert database.execute("select count(*) from runs where status = 'FINISHED'").fetchone() == (PROCESSES,)
    candidates = load(tmp_path).candidates
    assert len(candidates) == PROCESSES
    log = MoveLog(open_in(tmp_path))
    assert promote(candidates, log, replay_without_findings, decide_pass, sweep="together").champion == "kv0"
