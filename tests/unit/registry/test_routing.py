"""Routes: required evidence of engines, and atomic moves of aliases.

Monitors: the statistical tests on counts, and the route moves that follow. An implausible snapshot moves nothing.
"""

import json
import math
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from helpers.registry.candidates import MemoryRegistry
from helpers.registry.evidence_copies import edit, replayed
from helpers.registry.judged_engine import cited_tags, judged_engine

from pipeline.config.compose import plan
from pipeline.config.config import MonitorConfig
from pipeline.config.signing import SigningConfig
from pipeline.evidence.reading import identities
from pipeline.evidence.verify import registered_engine
from pipeline.registry import moves
from pipeline.registry.promotion import ROLLED_BACK_AT
from pipeline.registry.routing import (
    MONITOR_ALPHA,
    ClassSnapshot,
    Reading,
    monitor,
    quality_holds,
    read_monitors,
    read_snapshot,
    roll_back,
    step,
)
from pipeline.registry.tracking import Version
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal, UserError
from stages.verdict.candidate import Cited
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE
from stages.verdict.verdict import Thresholds

BOTH = {"retrieval": "fp8", "copy": "int8"}


@pytest.fixture
def fleet(tmp_path: Path) -> MemoryRegistry:
    return MemoryRegistry(tmp_path)


@pytest.fixture
def judged(fleet: MemoryRegistry) -> MemoryRegistry:
    """A registry with bf16, fp8 and int8 as versions 1 to 3."""
    for policy in ("bf16", "fp8", "int8"):
        fleet.judge(policy)
    return fleet


def test_classes_get_engines_by_number_or_name(judged: MemoryRegistry) -> None:
    lines = judged.routed(retrieval="fp8", copy="fp8")
    assert judged.aliases == {"route-retrieval": "2", "route-copy": "2"}
    assert lines == ["route-retrieval: version 2 (fp8)", "route-copy: version 2 (fp8)"]
    assert judged.replays == ["fp8"]
    judged.judge("fp8")
    assert judged.routed(copy="2", retrieval="fp8")[0] == "route-copy: version 2 (fp8), as it was"
    assert judged.aliases == {"route-retrieval": "4", "route-copy": "2", "route-retrieval-previous": "2"}


def test_a_manual_rollback_goes_to_the_previous_engine(judged: MemoryRegistry) -> None:
    judged.routed(retrieval="int8", copy="fp8")
    judged.routed(**BOTH)
    assert len(list(roll_back(judged.engines(), "retrieval"))) == 1
    assert judged.aliases["route-retrieval"] == "3"
    assert judged.read().left("retrieval") == {"2"}
    del judged.versions["2"]
    for workload, expected in (
        ("retrieval", "route-retrieval cannot go back: it has no previous engine"),
        ("copy", "route-copy cannot go back: it has no previous engine"),
        ("tool_call", "this model has no such route"),
    ):
        with pytest.raises(UserError, match=f"routing.rollback={workload}: {expected}"):
            list(roll_back(judged.engines(), workload))


@pytest.mark.parametrize(
    ("routes", "kind", "expected"),
    [
        ({"copy": "fp8", "summaries": "fp8"}, UserError, "routes.summaries: no such class; .* was judged on copy, retr"),
        ({"copy": "fp9"}, UserError, "copy=fp9: no registered engine has this name; there are bf16, fp8, int8"),
        ({"copy": "7"}, UserError, "routes.copy=7: no registered engine"),
        ({"copy": "fp8", "prose": "fp8"}, GateRefusal, "prose=fp8: version 2 .* not judged on prose"),
        ({"copy": "int8"}, GateRefusal, "copy=int8: version 4 is not proven: copy is INCONCLUSIVE: copy: a"),
        ({"copy": "bf16"}, GateRefusal, "copy=bf16: version 1 is not proven: identity: differs"),
    ],
)
def test_unknown_or_unproven_engines_move_nothing(
    judged: MemoryRegistry, routes: dict[str, str], kind: type[Exception], expected: str
) -> None:
    judged.judge("int8", copy="INCONCLUSIVE")
    judged.candidates["1"].identity.path.write_text("another")
    with pytest.raises(kind, match=expected):
        judged.routed(**routes)
    assert judged.moves == []


def test_routes_moved_by_another_command_are_left_alone(judged: MemoryRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_somebody_else(path: Path, purpose: str) -> AbstractContextManager[None]:
        judged.aliases["route-copy"] = "1"
        return locked(path, purpose)

    monkeypatch.setattr(moves, "locked", after_somebody_else)
    with pytest.raises(GateRefusal, match="route-copy: another command moved it"):
        judged.routed(**BOTH)
    assert judged.moves == []


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
    (evidence / SAMPLES_FILE).write_text("")
    with pytest.raises(
        GateRefusal, match=r"version 4 \(int8\): report: samples\.jsonl: differs, .*; restore the file, or judge"
    ):
        registered_engine(identities(store), SigningConfig(), Thresholds(), Version("4", tags))
    (evidence / REPORT_FILE).unlink()
    with pytest.raises(GateRefusal, match=r"its report is missing, or cannot be read; restore the file, or judge it again"):
        read(Version("4", tags))


LIMITS = plan(["stage=monitor", "monitor.snapshot=s"], multirun=False).jobs[0].monitor
WELL: dict[str, Any] = {
    "version": "1",
    "latency": {"good": 2000, "of": 2000, "limit_ms": 800},
    "json_validity": {"good": 2000, "of": 2000},
    "canaries": {"good": 400, "of": 400},
    "memory": {"live_tokens": 500, "max_tokens": 1000},
}
NO_JSON = {"json_validity": {"good": 500, "of": 2000}}
SLOW = {"latency": {"good": 1000, "of": 2000, "limit_ms": 800}}
FULL = {"memory": {"live_tokens": 950, "max_tokens": 1000}}


def int8_then_fp8(fleet: MemoryRegistry, *workloads: str) -> None:
    """Route `copy` and other classes to int8 (version 1), then to fp8 (version 2)."""
    for policy in ("int8", "fp8"):
        fleet.judge(policy)
        fleet.routed(**dict.fromkeys(("copy", *workloads), policy))


def fp8_beside(fleet: MemoryRegistry, **others: int) -> None:
    """Route `copy` to fp8 (version 1, 1,000 tokens). `others`: policy -> live tokens of the following versions."""
    for policy, live_tokens in {"fp8": 1000, **others}.items():
        fleet.judge(policy, live_tokens)
    fleet.routed(copy="fp8")


def limits(fleet: MemoryRegistry, snapshot: str | dict[str, Any]) -> MonitorConfig:
    """Return the monitors' limits with a file of a snapshot. A dict without `taken_at` gets the present time."""
    path = fleet.folder / "snapshot.json"
    path.write_text(
        snapshot if isinstance(snapshot, str) else json.dumps({"taken_at": datetime.now(UTC).isoformat(), **snapshot})
    )
    return LIMITS.model_copy(update={"snapshot": str(path)})


def monitored(fleet: MemoryRegistry, version: str = "1", others: Any = MappingProxyType({}), **changes: object) -> list[str]:
    """Check a snapshot of `copy` and `others`; return the output. Raises GateRefusal if a monitor breaks."""
    classes = {"copy": {**WELL, "version": version, **changes}, **others}
    return list(monitor(fleet.engines(), limits(fleet, {"classes": classes})))


def read(**changes: object) -> list[Reading]:
    return read_monitors(ClassSnapshot.model_validate({**WELL, **changes}), LIMITS)


def validity(good: int, of: int) -> str:
    (status,) = (reading.status for reading in read(json_validity={"good": good, "of": of}) if reading.name == "JSON validity")
    return status


@pytest.mark.parametrize(
    ("good", "of", "expected"),
    [(0, 0, "unknown"), (9, 10, "unknown"), (0, 2, "broken"), (1, 3, "unknown"), (400, 400, "holds"), (1950, 2000, "unknown"),
     (1900, 2000, "broken"), (1999, 2000, "holds")],
)  # fmt: skip
def test_a_monitor_breaks_by_its_bound_and_few_are_unknown(good: int, of: int, expected: str) -> None:
    assert validity(good, of) == expected


def test_a_fleet_at_the_limit_breaks_at_most_as_often_as_alpha() -> None:
    n, least = 300, LIMITS.min_json_validity
    broken = [good for good in range(n + 1) if validity(good, n) == "broken"]
    assert 0 < sum(math.comb(n, good) * least**good * (1 - least) ** (n - good) for good in broken) <= MONITOR_ALPHA


def test_quality_is_not_shown_to_hold_without_json_and_canaries() -> None:
    readings = read(json_validity=None, canaries=None)
    assert [(reading.name, reading.status) for reading in readings] == [("latency within 800 ms", "holds"), ("memory", "holds")]
    assert not quality_holds(readings)
    assert quality_holds(read())
    assert not quality_holds(read(canaries={"good": 9, "of": 10}))


def test_no_route_moves_without_a_break_or_a_previous_engine(fleet: MemoryRegistry) -> None:
    fp8_beside(fleet)
    moves = list(fleet.moves)
    for changes in ({}, {"json_validity": {"good": 1, "of": 3}}):
        assert monitored(fleet, "1", **changes)[-1] == "route-copy: stays at version 1"
    with pytest.raises(GateRefusal):
        monitored(fleet, "1", **NO_JSON)
    assert fleet.moves == moves


@pytest.mark.parametrize("broken", [NO_JSON, {"canaries": {"good": 200, "of": 400}}, SLOW, {**NO_JSON, **FULL}])
def test_a_broken_monitor_restores_the_previous_engine(fleet: MemoryRegistry, broken: dict[str, Any]) -> None:
    int8_then_fp8(fleet, "retrieval")
    well = {"retrieval": {**WELL, "version": "2"}}
    with pytest.raises(GateRefusal, match=r"monitor\.snapshot=.*: a monitor broke for copy"):
        monitored(fleet, "2", well, **broken)
    assert fleet.aliases == {"route-copy": "1", "route-retrieval": "2", "route-retrieval-previous": "1"}
    assert fleet.read().left("copy") == {"2"}
    assert monitored(fleet, "2", **broken) == ["route-copy: stays at version 1, since the snapshot is of version 2"]


@pytest.mark.parametrize("moved", ["copy", "retrieval"])
@pytest.mark.parametrize(("changes", "target"), [(NO_JSON, "1"), (FULL, "3")])
def test_a_class_that_another_command_moved_stops_no_other_move(
    fleet: MemoryRegistry, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], target: str, moved: str
) -> None:
    """`copy` moves back, and `retrieval` moves back or to a smaller engine. Another command has moved `copy` or `retrieval`."""
    int8_then_fp8(fleet, "retrieval")
    fleet.judge("fp8k_int4v", 1300)
    fleet.judge("int4")

    def after_somebody_else(path: Path, purpose: str) -> AbstractContextManager[None]:
        fleet.aliases[f"route-{moved}"] = "4"
        return locked(path, purpose)

    monkeypatch.setattr(moves, "locked", after_somebody_else)
    classes = {"copy": {**WELL, "version": "2", **NO_JSON}, "retrieval": {**WELL, "version": "2", **changes}}
    printed = list[str]()
    with pytest.raises(GateRefusal, match="a monitor broke for copy"):
        printed.extend(monitor(fleet.engines(), limits(fleet, {"classes": classes})))
    expected = {"copy": "1", "retrieval": target, moved: "4"}
    assert {name: fleet.aliases[f"route-{name}"] for name in expected} == expected
    outcomes = {line.partition(":")[0]: "not moved (route-" in line for line in printed if line.startswith("route-")}
    assert outcomes == {f"route-{name}": name == moved for name in expected}


def pressed(fleet: MemoryRegistry, version: str = "1", **changes: object) -> tuple[str | None, list[str]]:
    """Return the route of `copy` after memory pressure, and the output, with "refused" at the end if no move was possible."""
    lines: list[str] = []
    try:
        snapshot = {"classes": {"copy": {**WELL, "version": version, **FULL, **changes}}}
        lines.extend(monitor(fleet.engines(), limits(fleet, snapshot)))
    except GateRefusal:
        lines.append("refused")
    return fleet.aliases.get("route-copy"), lines


def test_memory_pressure_coarsens_old_values_first_keys_last(fleet: MemoryRegistry) -> None:
    fp8_beside(fleet, int4=1900, fp8k_int4v=1300, fp8k_int4v_aged=1200)
    served = ["1"]
    for _ in range(3):
        version, lines = pressed(fleet, served[-1])
        assert lines[-1] != "refused"
        assert version is not None
        served.append(version)
    assert [fleet.candidates[version].policy for version in served] == ["fp8", "fp8k_int4v_aged", "fp8k_int4v", "int4"]
    assert fleet.aliases["route-copy-previous"] == "3"
    version, lines = pressed(fleet, "2", latency=SLOW["latency"])
    assert (version, lines[-1]) == ("2", "refused"), "an engine that holds less would be slower"


@pytest.mark.parametrize(
    ("policy", "lines", "changes", "expected"),
    [
        ("int4", {}, {"canaries": {"good": 9, "of": 10}}, "it changes the keys, which is allowed only"),
        ("fp8k_int4v", {"copy": "INCONCLUSIVE"}, {}, "copy is INCONCLUSIVE: copy: a reason"),
    ],
)
def test_engines_without_suitable_keys_or_evidence_are_skipped(
    fleet: MemoryRegistry, policy: str, lines: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    fp8_beside(fleet)
    fleet.judge(policy, 1900, **lines)
    fleet.judge("fp8k_int4v_aged", 1200, "FAIL")
    fleet.judge("fp8k_int4v_aged", 900)  # holds less
    fleet.judge("fp8k_int4v", 1300)
    fleet.change("5", baseline=Cited(path=fleet.folder, digest="of other weights"))
    version, output = pressed(fleet, **changes)
    assert (version, output[-1]) == ("1", "refused")
    assert [line for line in output if line.startswith(f"copy: not version 2 ({policy}): {expected}")]


def test_a_rolled_back_engine_returns_only_by_name(fleet: MemoryRegistry) -> None:
    fp8_beside(fleet, fp8k_int4v=1300)
    assert pressed(fleet)[0] == "2"
    with pytest.raises(GateRefusal):
        monitored(fleet, "2", **NO_JSON)
    version, lines = pressed(fleet)
    assert version == "1"
    assert "copy: not version 2 (fp8k_int4v): was rolled back" in lines
    fleet.routed(copy="fp8k_int4v")
    fleet.routed(copy="fp8")
    assert pressed(fleet)[0] == "2"
    fleet.routed(copy="fp8")
    fleet.set_tags("2", {ROLLED_BACK_AT: "2026-11-30T12:00:00+00:00"})  # as champion
    assert pressed(fleet) == (version, lines)


def test_an_engine_that_failed_later_is_not_chosen(fleet: MemoryRegistry) -> None:
    fp8_beside(fleet, fp8k_int4v=1300)
    fleet.judge("int4", 1300, "FAIL")
    assert pressed(fleet)[0] == "2"
    fleet.routed(copy="fp8")
    fleet.judge("fp8k_int4v", 1300, "FAIL")
    version, lines = pressed(fleet)
    assert (version, lines[-1]) == ("1", "refused")
    assert "copy: not version 2 (fp8k_int4v): the same engine failed later, as version 4" in lines
    fleet.judge("fp8k_int4v", 1300)
    assert pressed(fleet)[0] == "5", "a PASS after the FAIL"


@pytest.mark.parametrize(
    ("now", "to", "keys", "recent_values"),
    [
        ("fp8", "fp8k_int4v_aged", False, False),
        ("fp8", "fp8k_int4v", False, True),
        ("fp8k_int4v_aged", "fp8k_int4v", True, True),  # the keys of its sinks and recent tokens are no longer exact
        ("fp8", "int4", True, True),
        ("int4_guarded", "int4", True, False),  # the keys of two layers
        ("fp16", "fp16_streaming", True, False),  # evicted keys are gone
    ],
)
def test_a_step_says_whether_keys_and_recent_values_lose(
    fleet: MemoryRegistry, now: str, to: str, keys: bool, recent_values: bool
) -> None:
    fleet.judge(now)
    fleet.judge(to)
    current, replacement = map(fleet.engines().find, fleet.read().versions.values())
    change = step(current, replacement)
    assert (change.keys, change.recent_values) == (keys, recent_values)


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_snapshot_that_is_not_of_now_is_refused(fleet: MemoryRegistry, seconds: int) -> None:
    now = datetime.now(UTC)
    fresh = {"taken_at": now.isoformat(), "classes": {"copy": WELL}}
    assert read_snapshot(limits(fleet, json.dumps(fresh, indent="\t"))).taken_at == now
    with pytest.raises(UserError, match=r"taken_at=.* s from now, more than 900; take a new one"):
        read_snapshot(limits(fleet, {**fresh, "taken_at": (now + timedelta(seconds=seconds)).isoformat()}))
    with pytest.raises(UserError, match="taken_at: "):
        read_snapshot(limits(fleet, json.dumps({"classes": {"copy": WELL}})))


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("copi", "2", r"classes\.copi: this model has no such route"),
        ("copy", "9", r"classes\.copy\.version=9: the registry has no such version; give one of 1, 2"),
        ("copy", "int8", r"classes\.copy\.version=int8: the registry has no such version"),
    ],
)
def test_unknown_classes_and_versions_move_nothing(fleet: MemoryRegistry, name: str, version: str, expected: str) -> None:
    int8_then_fp8(fleet)
    fleet.moves.clear()
    with pytest.raises(UserError, match=expected):
        monitored(fleet, "2", {name: {**WELL, **NO_JSON, "version": version}}, **NO_JSON)
    assert fleet.moves == []
