"""Routes: required evidence of engines, and atomic moves of aliases."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from helpers.registry.candidates import MemoryRegistry
from helpers.registry.evidence_copies import edit, replayed
from helpers.registry.judged_engine import cited_tags, judged_engine

from pipeline.config.signing import SigningConfig
from pipeline.evidence.reading import identities
from pipeline.evidence.verify import registered_engine
from pipeline.registry import moves
from pipeline.registry.routing import roll_back
from pipeline.registry.tracking import Version
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal, UserError
from stages.verdict.report import REPORT_FILE

BOTH = {"retrieval": "fp8", "copy": "int8"}


@pytest.fixture
def fleet(tmp_path: Path) -> MemoryRegistry:
    """A registry with bf16, fp8 and int8 as versions 1 to 3."""
    fleet = MemoryRegistry(tmp_path)
    for policy in ("bf16", "fp8", "int8"):
        fleet.judge(policy)
    return fleet


def test_classes_get_engines_by_number_or_name(fleet: MemoryRegistry) -> None:
    lines = fleet.routed(retrieval="fp8", copy="fp8")
    assert fleet.aliases == {"route-retrieval": "2", "route-copy": "2"}
    assert lines == ["route-retrieval: version 2 (fp8)", "route-copy: version 2 (fp8)"]
    assert fleet.replays == ["fp8"]
    fleet.judge("fp8")
    assert fleet.routed(copy="2", retrieval="fp8")[0] == "route-copy: version 2 (fp8), as it was"
    assert fleet.aliases == {"route-retrieval": "4", "route-copy": "2", "route-retrieval-previous": "2"}


def test_a_manual_rollback_goes_to_the_previous_engine(fleet: MemoryRegistry) -> None:
    fleet.routed(retrieval="int8", copy="fp8")
    fleet.routed(**BOTH)
    assert len(list(roll_back(fleet.engines(), "retrieval"))) == 1
    assert fleet.aliases["route-retrieval"] == "3"
    assert fleet.read().left("retrieval") == {"2"}
    del fleet.versions["2"]
    for workload, expected in (
        ("retrieval", "route-retrieval cannot go back: it has no previous engine"),
        ("copy", "route-copy cannot go back: it has no previous engine"),
        ("tool_call", "this model has no such route"),
    ):
        with pytest.raises(UserError, match=f"routing.rollback={workload}: {expected}"):
            list(roll_back(fleet.engines(), workload))


@pytest.mark.parametrize(
    ("routes", "kind", "expected"),
    [
        ({"copy": "fp8", "summaries": "fp8"}, UserError, "routes.summaries: no such class; .* copy, retr"),
        ({"copy": "fp9"}, UserError, "copy=fp9: no registered engine has this name; there are bf16, fp8, int8"),
        ({"copy": "7"}, UserError, "routes.copy=7: no registered engine"),
        ({"copy": "fp8", "prose": "fp8"}, GateRefusal, "prose=fp8: version 2 .* not judged on prose"),
        ({"copy": "int8"}, GateRefusal, "copy=int8: version 4 is not proven: copy is INCONCLUSIVE: copy: a"),
        ({"copy": "bf16"}, GateRefusal, "copy=bf16: version 1 is not proven: identity: differs"),
    ],
)
def test_unknown_or_unproven_engines_move_nothing(
    fleet: MemoryRegistry, routes: dict[str, str], kind: type[Exception], expected: str
) -> None:
    fleet.judge("int8", copy="INCONCLUSIVE")
    fleet.candidates["1"].identity.path.write_text("another")
    with pytest.raises(kind, match=expected):
        fleet.routed(**routes)
    assert fleet.moves == []


def test_routes_moved_by_another_command_are_left_alone(fleet: MemoryRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_somebody_else(path: Path, purpose: str) -> AbstractContextManager[None]:
        fleet.aliases["route-copy"] = "1"
        return locked(path, purpose)

    monkeypatch.setattr(moves, "locked", after_somebody_else)
    with pytest.raises(GateRefusal, match="route-copy: another command moved it"):
        fleet.routed(**BOTH)
    assert fleet.moves == []


def test_an_engine_is_found_by_its_versions_citations(tmp_path: Path) -> None:
    store = tmp_path / "store"
    evidence = judged_engine(store)
    tags = cited_tags(evidence)
    read = partial(registered_engine, identities(store), SigningConfig(), None)
    engine = read(Version("4", tags))
    assert (engine.candidate.version, str(engine), engine.policy.name) == ("4", "version 4 (int8)", "int8")
    assert {"retrieval", "copy"} <= engine.workloads
    assert engine.replay() is None
    (engine.candidate.engine.path / "weights.bin").write_text("altered")
    with pytest.raises(GateRefusal, match=r"^engine: weights\.bin: differs, recorded "):
        read(Version("4", tags)).verify()
    with pytest.raises(GateRefusal, match=r"version 4 \(int8\) has no evidence in"):
        read(Version("4", {**tags, "identity_digest": "0" * 64}))
    edit(engine.candidate.engine.path / "bundle.json", lambda bundle: bundle.update(max_tokens="many"))
    with pytest.raises(GateRefusal, match=r"version 4 \(int8\): its evidence cannot be read: 1 validation error for Limits"):
        read(Version("4", tags))
    (engine.candidate.engine.path / "bundle.json").unlink()
    assert isinstance(read(Version("4", tags)).replay(), GateRefusal)
    missing = {finding.name for finding in replayed(evidence) if finding.status == "missing"}
    assert missing == {"engine: bundle.json"}
    (evidence / REPORT_FILE).unlink()
    with pytest.raises(GateRefusal, match="its report is missing"):
        read(Version("4", tags))
