"""Promotions and rollbacks over a real SQLite store, four at once."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from interruptions import FORK
from judged_candidates import decide_pass, judged_candidate, proven, replay_without_findings

from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.promotion import promote, rollback
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Tracking, locate
from pipeline.trust.movelog import MoveLog


def opened(work: Path) -> MlflowStore:
    return MlflowStore(locate(Tracking(), work, "moves", {}))


def in_a_child(act: Callable[[], object]) -> int:
    """Only children open the store: each begins as a command does. The exit code."""
    child = FORK.Process(target=act)
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


def registered(work: Path) -> list[Candidate]:
    return [Candidate.model_validate_json(path.read_text()) for path in sorted(work.glob("candidate-*"))]


def register(work: Path) -> None:
    store = opened(work)
    for number, policy in enumerate(("bf16", "fp8", "int8")):
        with store.candidate("sweep", policy, "onnxruntime", {}) as run:
            done = store.conclude(run, judged_candidate(work, policy, metrics={"memory/max_live_tokens": float(number)}))
        (work / f"candidate-{number}").write_text(done.model_dump_json())


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    assert in_a_child(partial(register, work)) == 0
    for name in ("bf16", "fp8"):
        assert in_a_child(partial(move, work, name)) == 0
    return work


def move(work: Path, name: str | None, ready: Callable[[], object] = lambda: None) -> None:
    """Promote the candidate with a name, or roll back."""
    log = MoveLog(opened(work))
    ready()
    with suppress(UserError, GateRefusal):
        if name is None:
            rollback(log, proven)
        else:
            asked = [one for one in registered(work) if one.name == name]
            promote(asked, log, replay_without_findings, decide_pass, sweep="sweep", name=name)


def check(work: Path) -> None:
    """The log can be trusted, and the aliases are where it says."""
    store = opened(work)
    log = MoveLog(store)
    log.repair()
    history = log.read()
    assert history.problem is None, history.problem
    assert store.alias("champion") is not None
    for alias, version in history.aliases.items():
        assert store.alias(alias) == version


def test_four_processes_that_move_at_once_leave_one_log(work: Path) -> None:
    for _ in range(4):
        open_all = FORK.Barrier(4)  # a store takes a second to open, a move a fraction of it
        children = [FORK.Process(target=move, args=(work, name, open_all.wait)) for name in ("int8", None, "bf16", None)]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0] * 4
        assert in_a_child(partial(check, work)) == 0
