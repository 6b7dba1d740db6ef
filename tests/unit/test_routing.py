"""Routes: what a routing file may say, what an engine must prove, and that aliases move together or not at all."""

from pathlib import Path

import pytest
from judged_engine import judged_engine
from routed_engines import Fleet, RecordingRegistry

from pipeline.artifacts.digest import file_digest, files_digest, tree_files
from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal, UserError
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import registered_engine
from pipeline.evidence.verify import replay_candidate
from pipeline.registry.summary import Registration, evidence_digest
from pipeline.routing.files import read_routing_file
from pipeline.routing.moves import Aliases, read_aliases
from pipeline.routing.settings import RoutingConfig
from pipeline.routing.stages import roll_back, route
from pipeline.trust.movelog import MoveLog
from pipeline.verdict.report import REPORT_FILE

BOTH = "routes: {retrieval: {policy: fp8, fallback: bf16}, copy: {policy: int8}}"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """bf16, fp8 and int8 as versions 1 to 3."""
    fleet = Fleet(tmp_path)
    for policy in ("bf16", "fp8", "int8"):
        fleet.add(policy)
    return fleet


def given(fleet: Fleet, text: str) -> RoutingConfig:
    path = fleet.folder / "routes.yaml"
    path.write_text(text)
    return RoutingConfig(file=str(path), rollback=None)


def routed(fleet: Fleet, text: str) -> list[str]:
    said: list[str] = []
    route(fleet.engines, given(fleet, text), said.append)
    return said


def test_each_class_gets_its_engine_and_an_engine_is_replayed_once(fleet: Fleet) -> None:
    said = routed(fleet, "default: {policy: fp8}\n" + BOTH)
    assert fleet.registry.aliases == {
        "route-default": "2",
        "route-retrieval": "2",
        "route-retrieval-fallback": "1",
        "route-copy": "3",
    }
    assert said == [
        "route-default: version 2 (fp8)",
        "route-retrieval: version 2 (fp8); fallback version 1 (bf16)",
        "route-copy: version 3 (int8)",
    ]
    assert sorted(fleet.replays) == ["bf16", "fp8", "int8"]


def test_the_record_and_the_version_say_from_to_when_who_and_why(fleet: Fleet) -> None:
    routed(fleet, BOTH)
    routed(fleet, "routes: {copy: {policy: fp8}}")
    title, tags, ended = fleet.registry.records[-1]
    assert (title, ended) == ("route", "FINISHED")
    assert tags["move/copy"] == "version 3 -> 2: the routing file"
    assert tags["routing_file"] == file_digest(fleet.folder / "routes.yaml")
    said = fleet.registry.versions["2"]["route-copy"]
    assert said.endswith(": version 3 -> 2: the routing file")
    assert " by " in said


def test_a_number_names_a_version_and_a_name_the_latest_version_that_has_it(fleet: Fleet) -> None:
    fleet.add("fp8")
    routed(fleet, "routes: {copy: {policy: 2}, retrieval: {policy: fp8}}")
    assert (fleet.route("copy"), fleet.route("retrieval")) == ("2", "4")


def test_the_same_file_again_moves_nothing_and_leaves_the_way_back(fleet: Fleet) -> None:
    routed(fleet, "routes: {copy: {policy: int8}}")
    routed(fleet, "routes: {copy: {policy: fp8}}")
    fleet.registry.moves.clear()
    assert routed(fleet, "routes: {copy: {policy: fp8}}") == ["route-copy: version 2 (fp8), as it was"]
    assert fleet.registry.moves == []
    assert read_aliases(fleet.registry, "copy") == Aliases("2", "3")


def test_the_file_before_brings_the_routes_before(fleet: Fleet) -> None:
    routed(fleet, BOTH)
    routed(fleet, "routes: {retrieval: {policy: int8}}")
    routed(fleet, BOTH)
    assert read_aliases(fleet.registry, "retrieval") == Aliases("2", "3", "1")


def test_a_rollback_by_hand_goes_to_the_previous_then_to_the_fallback_then_nowhere(fleet: Fleet) -> None:
    routed(fleet, "routes: {retrieval: {policy: int8}}")
    routed(fleet, BOTH)
    found = []
    for _ in range(2):
        roll_back(fleet.engines, "retrieval", lambda _line: None)
        found.append(fleet.route("retrieval"))
    assert found == ["3", "1"]
    assert "rolled-back-retrieval" in fleet.registry.versions["2"]
    with pytest.raises(UserError, match=r"routing\.rollback=retrieval: .* cannot go back: no previous, no fallback"):
        roll_back(fleet.engines, "retrieval", lambda _line: None)
    with pytest.raises(UserError, match=r"routing\.rollback=tool_call: this model has no such route"):
        roll_back(fleet.engines, "tool_call", lambda _line: None)


def test_a_rollback_takes_no_engine_that_was_never_proven_for_the_class(fleet: Fleet) -> None:
    routed(fleet, "routes: {copy: {policy: fp8}}")
    fleet.registry.aliases["route-copy-previous"] = "1"  # by hand
    with pytest.raises(UserError, match=r"its previous, version 1, was never proven for copy, no fallback"):
        roll_back(fleet.engines, "copy", lambda _line: None)
    fleet.registry.aliases["route-copy-previous"] = "9"
    with pytest.raises(UserError, match=r"its previous, version 9, was deleted"):
        roll_back(fleet.engines, "copy", lambda _line: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "routes must name a class, or give a default"),
        ("- a", "should be an object"),
        ("routes: {copy: {policy: fp8}, copy: {policy: int8}}", "cannot be read"),
        ("routes: {copy: {policy: .nan}}", r"routes\.copy\.policy: Input should be a valid string \(got nan\)"),
        ("routes: {copy: {fallback: fp8}}", r"routes\.copy\.policy: Field required"),
        ("routes: {copy: {policy: fp8, fallback: fp8}}", "fallback=fp8 is the policy itself"),
        ("routes: {copy: {policy: fp8, fallbak: bf16}}", r"routes\.copy\.fallbak: Extra inputs"),
        ("routes: {default: {policy: fp8}}", "must stand beside routes"),
        ("routes: {copy-previous: {policy: fp8}}", "must not end with -previous or -fallback"),
        ("routes: {'a b': {policy: fp8}}", "routes.a b: String should match"),
        ("routes: [", "cannot be read"),
    ],
)
def test_a_routing_file_that_cannot_be_meant_is_refused_in_one_line(fleet: Fleet, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        read_routing_file(given(fleet, text))
    assert str(caught.value).startswith("routing.file=")
    assert "\n" not in str(caught.value)


def test_a_routing_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"routing\.file=.*nowhere: cannot be read"):
        read_routing_file(RoutingConfig(file=str(tmp_path / "nowhere"), rollback=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("routes: {copy: {policy: fp8}, summaries: {policy: fp8}}", "routes.summaries: no such class; .* copy, retrieval"),
        (
            "routes: {copy: {policy: fp9}}",
            "routes.copy.policy=fp9: no registered engine is called so; there are bf16, fp8, int8",
        ),
        ("routes: {copy: {policy: 7}}", "routes.copy.policy=7: no registered engine"),
        ("routes: {copy: {policy: fp8, fallback: 2}}", "routes.copy.fallback: is version 2, the policy itself"),
    ],
)
def test_an_unknown_class_or_engine_is_bad_input_and_nothing_moves(fleet: Fleet, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        routed(fleet, text)
    assert (fleet.registry.moves, fleet.registry.records) == ([], [])


def test_a_class_that_the_report_did_not_judge_or_not_as_pass_is_refused_and_nothing_moves(fleet: Fleet) -> None:
    with pytest.raises(
        GateRefusal, match=r"routes\.prose\.policy=fp8: version 2 is not proven: its report has not judged prose"
    ):
        routed(fleet, "routes: {copy: {policy: fp8}, prose: {policy: fp8}}")
    fleet.lines[fleet.candidates["3"].engine.digest, "copy"] = "INCONCLUSIVE"
    with pytest.raises(GateRefusal, match=r"routes\.copy\.policy=int8: version 3 is not proven: copy is INCONCLUSIVE: copy: a"):
        routed(fleet, BOTH)
    assert (fleet.registry.moves, fleet.registry.records) == ([], [])


def test_evidence_that_was_edited_is_refused_also_of_a_fallback_and_nothing_moves(fleet: Fleet) -> None:
    (fleet.candidates["1"].engine.path / "bundle.json").write_text("another")
    with pytest.raises(
        GateRefusal, match=r"routes\.retrieval\.fallback=bf16: version 1 is not proven: the engine in .* digest"
    ):
        routed(fleet, BOTH)
    assert (fleet.registry.moves, fleet.registry.records) == ([], [])


class Killed(BaseException):
    """The process died: nothing after it runs."""


class FailsAt(RecordingRegistry):
    """Fails at one move, and is dead from then on if it was killed."""

    def __init__(self, folder: Path, at: int, *, killed: bool) -> None:
        super().__init__(folder)
        self.at, self.killed = at, killed

    def set_alias(self, alias: str, version: str) -> None:
        if len(self.moves) == self.at or (self.killed and len(self.moves) > self.at):
            self.at += 0 if self.killed else -1000
            raise Killed if self.killed else ConnectionError("the server went away")
        super().set_alias(alias, version)

    def delete_alias(self, alias: str) -> None:
        if self.killed and len(self.moves) >= self.at:
            raise Killed
        super().delete_alias(alias)


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("at", range(5))
def test_what_a_move_that_failed_or_was_killed_left_the_next_command_completes(fleet: Fleet, at: int, killed: bool) -> None:
    routed(fleet, "routes: {retrieval: {policy: int8}, copy: {policy: bf16}}")
    before, alive = dict(fleet.registry.aliases), fleet.registry
    dying = FailsAt(fleet.folder, at, killed=killed)
    dying.versions, dying.aliases, dying.model = alive.versions, dict(before), dict(alive.model)
    fleet.registry = dying
    with pytest.raises(Killed if killed else ConnectionError):
        routed(fleet, BOTH)
    assert [ended for _, _, ended in dying.records] == ["FAILED"]
    for workload, old, new in (("retrieval", "3", "2"), ("copy", "1", "3")):
        found = read_aliases(dying, workload)
        assert found.now in (old, new)
        assert old in (found.now, found.previous), "a route that moved has its way back"
    alive.aliases, alive.model = dying.aliases, dying.model
    MoveLog(alive).repair()
    assert read_aliases(alive, "retrieval") == Aliases("2", "3", "1")
    assert read_aliases(alive, "copy") == Aliases("3", "1")


def test_routes_that_somebody_else_moved_meanwhile_are_left_to_them(fleet: Fleet) -> None:
    class MovedBetweenTwoReads(RecordingRegistry):
        reads = 0

        def alias(self, alias: str) -> str | None:
            self.reads += alias == "route-copy"
            if self.reads == 2:
                self.aliases["route-copy"] = "1"
            return super().alias(alias)

    moved = MovedBetweenTwoReads(fleet.folder)
    moved.versions = fleet.registry.versions
    fleet.registry = moved
    with pytest.raises(GateRefusal, match="route-copy was moved meanwhile: nothing was moved"):
        routed(fleet, BOTH)
    assert moved.moves == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stage=route"], "stage=route needs routing.file=FILE or routing.rollback=CLASS"),
        (["stage=route", "routing.file=a", "routing.rollback=b"], "one of the two"),
        (["routing.file=a"], "routing.file=a: only stage=route reads it"),
        (["stage=monitor"], "monitor.snapshot: missing"),
        (["stage=route", "routing.rollback=a", "monitor.snapshot=s"], "monitor.snapshot=s: only stage=monitor reads it"),
        (["stage=monitor", "monitor.snapshot=s", "monitor.alpha=0"], r"monitor\.alpha"),
    ],
)
def test_keys_of_another_stage_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        plan(overrides, multirun=False)


def test_an_engine_is_found_in_the_store_by_what_its_version_cites_and_its_evidence_replays(tmp_path: Path) -> None:
    store = tmp_path / "store"
    evidence = judged_engine(store)
    identity = read_identity(evidence / IDENTITY_FILE)
    places = {role: store / identity.link(role).place for role in ("engine", "baseline", "evaluation")}
    tags = {
        "kv": "int8",
        "engine_digest": files_digest(tree_files(places["engine"])),
        "baseline_digest": files_digest(tree_files(places["baseline"])),
        "report_digest": evidence_digest(places["evaluation"] / REPORT_FILE),
        "identity_digest": file_digest(evidence / IDENTITY_FILE),
    }
    version = Registration(run_id="run", model_version="4")
    found = registered_engine(store, version, tags)
    assert (found.version, str(found), found.policy.name) == ("4", "version 4 (int8)", "int8")
    assert {"retrieval", "copy"} <= found.workloads
    assert {finding.status for finding in replay_candidate(found.candidate).findings} == {"same"}
    with pytest.raises(GateRefusal, match=r"version 4 \(int8\) has no evidence in"):
        registered_engine(store, version, {**tags, "identity_digest": "0" * 64})
    (evidence / REPORT_FILE).unlink()
    with pytest.raises(GateRefusal, match="its report is missing"):
        registered_engine(store, version, tags)
