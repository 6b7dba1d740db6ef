"""Routes against a real SQLite store: aliases, tags and records, and what a move that fails leaves."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from judged_candidates import judged_candidate
from routed_engines import Fleet

from pipeline.core.errors import GateRefusal
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.runs import track
from pipeline.registry.summary import Candidate, Registration
from pipeline.registry.tracking import Tracking, locate
from pipeline.routing.engines import Engine, Engines
from pipeline.routing.moves import Aliases, Move, make_moves, read_aliases, way_back
from pipeline.routing.settings import RoutingConfig
from pipeline.routing.stages import roll_back, route
from pipeline.trust.movelog import MoveLog


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MlflowStore:
    return MlflowStore(locate(Tracking(), tmp_path_factory.mktemp("work"), "routed", {}))


@pytest.fixture(scope="module")
def engines(store: MlflowStore, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """bf16, fp8 and int8, registered in this order as versions 1 to 3."""
    folder = tmp_path_factory.mktemp("engines")
    found: dict[str, Candidate] = {}
    for policy in ("bf16", "fp8", "int8"):
        with track(store, "sweep", policy, "onnxruntime", {}) as run:
            candidate = run.conclude(judged_candidate(folder, policy, metrics={}))
        assert candidate.registration is not None
        found[candidate.registration.model_version] = candidate
    fleet = Fleet(folder)

    def find(registration: Registration, _tags: Mapping[str, str]) -> Engine:
        fleet.candidates[registration.model_version] = found[registration.model_version]
        fleet.live[registration.model_version] = 1000
        return fleet.engines.find(registration, {})

    opened = fleet.engines
    return Engines(store, MoveLog(store), find, opened.replay, opened.decide)


def routed(engines: Engines, folder: Path, text: str) -> None:
    path = folder / "routes.yaml"
    path.write_text(text)
    route(engines, RoutingConfig(file=str(path), rollback=None), lambda _line: None)


def records(store: MlflowStore) -> list[tuple[str, str]]:
    runs = store.client.search_runs([store.experiment_id], "tags.stage = 'route'", order_by=["attributes.start_time ASC"])
    return [(run.data.tags.get("move/copy", ""), run.info.status) for run in runs]


def test_routes_move_with_tags_and_records_and_come_back(store: MlflowStore, engines: Engines, tmp_path: Path) -> None:
    routed(engines, tmp_path, "default: {policy: fp8}\nroutes: {copy: {policy: int8, fallback: bf16}}")
    assert read_aliases(store, "copy") == Aliases("3", None, "1")
    assert read_aliases(store, "default") == Aliases("2")
    routed(engines, tmp_path, "routes: {copy: {policy: fp8, fallback: bf16}}")
    assert read_aliases(store, "copy") == Aliases("2", "3", "1")
    tags = store.tags("2")
    assert tags is not None
    assert tags["route-copy"].endswith("version 3 -> 2: the routing file")
    assert tags["proven-copy"] == tags["report_digest"]
    roll_back(engines, "copy", lambda _line: None)
    roll_back(engines, "copy", lambda _line: None)
    assert read_aliases(store, "copy") == Aliases("1", None, "1")
    assert store.alias("candidate") == "3", "promotion's own aliases stay"
    said = ["none -> 3: the routing file", "3 -> 2: the routing file", "2 -> 3: by hand; to its previous"]
    said.append("3 -> 1: by hand; to its fallback")
    assert records(store) == [(f"version {one}", "FINISHED") for one in said]


def test_a_move_that_fails_is_completed_by_the_next_command(store: MlflowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: read_aliases(store, name) for name in ("copy", "default")}
    moves = [Move(name, aliases, aliases.moved_to("3"), "a test") for name, aliases in before.items()]
    set_alias = store.set_alias

    def fail_at_the_second_route(alias: str, version: str) -> None:
        if (alias, version) == ("route-default", "3"):
            raise ConnectionError("the server went away")
        set_alias(alias, version)

    monkeypatch.setattr(store, "set_alias", fail_at_the_second_route)
    with pytest.raises(ConnectionError):
        make_moves(MoveLog(store), store, "route", moves, {"stage": "route"})
    assert records(store)[-1] == ("version 1 -> 3: a test", "FAILED")
    monkeypatch.undo()
    MoveLog(store).repair()
    assert {name: read_aliases(store, name).now for name in before} == {"copy": "3", "default": "3"}


def test_a_version_that_was_deleted_is_no_way_back(store: MlflowStore, engines: Engines, tmp_path: Path) -> None:
    routed(engines, tmp_path, "routes: {retrieval: {policy: fp8, fallback: int8}}")
    store.client.delete_model_version(store.location.model_name, "3")
    with pytest.raises(GateRefusal, match=r"route-retrieval cannot go back: no previous, no fallback"):
        way_back(store, "retrieval", read_aliases(store, "retrieval"), "a test")
