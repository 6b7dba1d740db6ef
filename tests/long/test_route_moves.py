"""Routes against a real SQLite store: aliases and records, a move that fails, and a version that was deleted."""

from pathlib import Path

import pytest
from judged_candidates import judged_candidate
from routed_engines import Fleet

from pipeline.core.errors import GateRefusal
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.tracking import Tracking, locate
from pipeline.routing.engines import Engines
from pipeline.routing.moves import Aliases, read_aliases, way_back
from pipeline.routing.stages import roll_back, route
from pipeline.trust.movelog import MoveLog


def test_routes_move_survive_a_failure_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MlflowStore(locate(Tracking(), tmp_path / "work", "routed", {}))
    fleet = Fleet(tmp_path)
    for policy in ("bf16", "fp8", "int8"):  # versions 1 to 3
        fleet.add(policy)
        with store.candidate("sweep", policy, "onnxruntime", {}) as run:
            store.conclude(run, judged_candidate(tmp_path, policy, metrics={}))
    log, memory = MoveLog(store), fleet.engines
    engines = Engines(log, store.registered, memory.find, memory.replay, memory.decide)

    def routed(text: str) -> None:
        route(engines, fleet.file(text), lambda _line: None)

    routed("default: {policy: fp8}\nroutes: {copy: {policy: int8, fallback: bf16}}")
    assert read_aliases(store, "copy") == Aliases("3", None, "1")
    assert read_aliases(store, "default") == Aliases("2")
    with monkeypatch.context() as patch:
        patch.setattr(store, "set_alias", None)
        with pytest.raises(TypeError):
            routed("routes: {copy: {policy: fp8, fallback: bf16}}")
    assert read_aliases(store, "copy") == Aliases("3", None, "1")
    log.repair()
    assert read_aliases(store, "copy") == Aliases("2", "3", "1")
    for _ in range(2):
        roll_back(engines, "copy", lambda _line: None)
    assert read_aliases(store, "copy") == Aliases("1", None, "1")
    assert store.alias("candidate") == "3", "promotion's own aliases stay"
    assert [record.why.partition(": ")[2] for record in log.read().records[1:]] == [
        "copy version 3 -> 2: the routing file",
        "copy version 2 -> 3: by hand; to its previous",
        "copy version 3 -> 1: by hand; to its fallback",
    ]
    routed("routes: {retrieval: {policy: fp8, fallback: int8}}")
    store.client.delete_model_version(store.location.model_name, "3")
    with pytest.raises(GateRefusal, match=r"route-retrieval cannot go back: no previous, no fallback"):
        way_back(engines, "retrieval", read_aliases(store, "retrieval"), "a test")
