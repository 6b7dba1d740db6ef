"""Eight processes of mixed stages over one work directory and one store, and what must be there when they have ended."""

import multiprocessing
import os
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from interruptions import attempt
from judged_candidates import decide_pass, proven, replay_without_findings
from small_runs import build, evaluate, open_tracking

from pipeline.artifacts.digest import tree_files
from pipeline.artifacts.store import _manifest
from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry import promotion, summary
from pipeline.trust.movelog import MoveLog

FORK = multiprocessing.get_context("fork")


def take_part(number: int, work: Path, checkpoint: Path, kind: str, uri: str | None) -> list[str]:
    """Do one process's part of a round; return the versions that it registered."""
    if kind == "build":
        build(work, checkpoint, f"shared{number}")
    elif kind == "evaluate":
        return [evaluate(work, checkpoint, f"alone{number}-{os.getpid()}", f"sweep-{os.getpid()}", uri).version]
    elif kind == "sweep":
        policies = (f"shared{number}", "shared0")
        return [evaluate(work, checkpoint, policy, f"sweep-{os.getpid()}", uri).version for policy in policies]
    elif kind == "verify":
        for path in (work / "artifacts").glob("[!.]*/[!.]*"):
            manifest = _manifest(path)
            assert manifest is not None, f"{path} is there and not finished"
            assert tree_files(path) == manifest["files"], path
    elif kind == "promote":
        last, store = summary.load(work), open_tracking(work, uri)
        try:
            promotion.promote(last.candidates, MoveLog(store), replay_without_findings, decide_pass, sweep=last.sweep)
        except GateRefusal as error:
            if "rolled back" not in str(error) and "no candidate" not in str(error):
                raise
    elif kind == "rollback":
        with suppress(UserError):  # there may be no previous champion
            promotion.rollback(MoveLog(open_tracking(work, uri)), proven)
    return []


KINDS = ("build", "evaluate", "sweep", "sweep", "evaluate", "verify", "promote", "rollback")


def _part(number: int, work: Path, checkpoint: Path, uri: str | None, results: Any) -> None:
    try:
        results.put((number, take_part(number % 3, work, checkpoint, KINDS[number], uri), ""))
    except BaseException:
        results.put((number, [], traceback.format_exc()))


def check_nothing_is_lost(work: Path, uri: str | None, versions: list[str], serves: bool) -> None:
    """Every registered version is there with its evidence, every run has ended, and an engine serves where it has to."""
    store = open_tracking(work, uri)
    known = {one.number: one.tags for one in store.registered()}
    assert set(versions) <= known.keys()
    assert all(tags["verdict"] == "PASS" for tags in known.values())
    runs = store.client.search_runs([store.experiment_id], max_results=1000)
    open_runs = [(run.info.run_name, run.info.status, run.data.tags) for run in runs if run.info.status != "FINISHED"]
    assert open_runs == [], open_runs
    for tags in known.values():
        model = store.client.get_logged_model(tags["logged_model"])
        assert str(model.status) == "READY"
        assert "report.json" in {file.path for file in store.client.list_logged_model_artifacts(model.model_id)}
    assert store.alias("champion") in known or not serves
    assert [path for path in (work / "artifacts").glob("*/.*-*") if path.is_dir()] == []
    take_part(0, work, work, "verify", uri)


def play(work: Path, checkpoint: Path, rounds: int, uri: str | None = None) -> None:
    """Play rounds of all eight at once, the first over no store; only children open it: each begins as a command does."""
    versions: list[str] = []
    for played in range(rounds):
        results: Any = FORK.Queue()
        parts = [FORK.Process(target=_part, args=(number, work, checkpoint, uri, results)) for number in range(len(KINDS))]
        for part in parts:
            part.start()
        ended = [results.get(timeout=300) for _ in parts]
        for part in parts:
            part.join(60)
        failed = [(KINDS[number], said) for number, _, said in ended if said]
        assert failed == [], "\n".join(said for _, said in failed)
        versions += [version for _, registered, _ in ended for version in registered]
        checked = attempt(partial(check_nothing_is_lost, work, uri, versions, serves=played > 0), work)
        assert checked.code == 0, checked.said
