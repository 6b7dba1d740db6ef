"""stage=route and stage=monitor: what they decide, and the lines that they say.

A monitor is a share of good requests with a least that it may be. It is **broken** where the exact one-sided upper bound of
the share is below that (Clopper-Pearson at `monitor.alpha`), it **holds** where the lower bound is not below it, and between
the two it is **unknown**: too few requests to tell. Noise moves nothing. The bounds take requests for independent of each
other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline import statistics
from pipeline.artifacts.digest import file_digest
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.strict import absolute
from pipeline.routing.downshift import step, step_down
from pipeline.routing.engines import Engine, Engines, check_classes
from pipeline.routing.files import DEFAULT, ClassSnapshot, MonitorConfig, RoutingConfig, Share, read_routing_file, read_snapshot
from pipeline.routing.moves import Move, alias_of, make_moves, read_aliases, way_back

Status = Literal["holds", "broken", "unknown"]
Kind = Literal["latency", "quality", "memory"]


@dataclass(frozen=True)
class Reading:
    kind: Kind
    """Of quality are JSON validity and canaries. Broken memory is pressure: all tokens are counted, so it is never unknown."""
    name: str
    status: Status
    text: str


def quality_holds(readings: Sequence[Reading]) -> bool:
    """Whether there is a monitor of quality, and every one of them is shown to hold."""
    return {reading.status for reading in readings if reading.kind == "quality"} == {"holds"}


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> list[Reading]:

    def reading(kind: Kind, name: str, share: Share, least: float) -> Reading:
        upper, lower = (statistics.bounds.share_bound(share.good, share.of, limits.alpha, lower=side) for side in (False, True))
        status: Status = "broken" if upper < least else "holds" if lower >= least else "unknown"
        bounds = f"{100 * (1 - limits.alpha):g} % bounds {lower:.4f} to {upper:.4f}"
        return Reading(kind, name, status, f"{share.good:,} of {share.of:,}, {bounds}, least {least:g}")

    latency, memory, most = snapshot.latency, snapshot.memory, limits.max_live_share
    found = [reading("latency", f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit)]
    if snapshot.json_validity is not None:
        found.append(reading("quality", "JSON validity", snapshot.json_validity, limits.min_json_validity))
    if snapshot.canaries is not None:
        found.append(reading("quality", "canaries", snapshot.canaries, limits.min_canary_accuracy))
    pressure = memory.live_tokens / memory.max_tokens > most
    tokens = f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {most:.0%}"
    return [*found, Reading("memory", "memory", "broken" if pressure else "holds", tokens)]


Say = Callable[[str], None]


def route(engines: Engines, routing: RoutingConfig, say: Say) -> None:
    """Make the routes those of the routing file. Classes that it does not name stay as they are."""
    named: dict[str, dict[str, Engine]] = {}  # class -> key of the routing file -> engine
    for workload, entry in read_routing_file(routing).by_class.items():
        place = f"routing.file: {'' if workload == DEFAULT else 'routes.'}{workload}"
        keys = {f"{place}.policy": entry.policy, f"{place}.fallback": entry.fallback}
        named[workload] = {key: engines.named(name, key) for key, name in keys.items() if name is not None}
    check_classes({workload: listed.values() for workload, listed in named.items()})
    moves, lines = [], []
    for workload, listed in named.items():
        policy, *fallbacks = (engines.proven(engine, workload, key) for key, engine in listed.items())
        fallback = fallbacks[0] if fallbacks else None
        if fallback is not None and fallback.version == policy.version:
            raise UserError(f"{list(listed)[1]}: is version {policy.version}, the policy itself; give another, or leave it out")
        before = read_aliases(engines.log.registry, workload)
        after = replace(before.moved_to(policy.version), fallback=None if fallback is None else fallback.version)
        if after != before:
            reports = {engine.version: engine.report for engine in listed.values()}
            moves.append(Move(workload, before, after, "the routing file", reports))
        notes = (", as it was" if after == before else "") + (f"; fallback {fallback}" if fallback is not None else "")
        lines.append(f"{alias_of(workload)}: {policy}{notes}")
    make_moves(engines.log, f"routing file {file_digest(absolute(str(routing.file)))[:12]}", moves)
    for line in lines:
        say(line)


def roll_back(engines: Engines, workload: str, say: Say) -> None:
    """Bring the previous engine of a class back, or its fallback."""
    before = read_aliases(engines.log.registry, workload)
    if before.now is None:
        raise UserError(f"routing.rollback={workload}: this model has no such route; give a class that stage=status lists")
    try:
        move = way_back(engines, workload, before, "by hand")
    except GateRefusal as error:
        raise UserError(f"routing.rollback={workload}: {error}") from error
    make_moves(engines.log, "route back", [move])
    say(f"{alias_of(workload)}: {move}")


@dataclass(frozen=True)
class Decision:
    text: str
    move: Move | None = None
    refused: bool = False
    """Whether something broke: also where nothing can be done about it."""


def monitor(engines: Engines, limits: MonitorConfig, say: Say) -> None:
    """Move routes as a snapshot of the fleet asks: back where a monitor broke, down where memory is short."""
    snapshot, where, registry = read_snapshot(limits), f"monitor.snapshot={limits.snapshot}", engines.log.registry
    for workload, counted in snapshot.classes.items():
        if read_aliases(registry, workload).now is None:
            raise UserError(f"{where}: classes.{workload}: this model has no such route; give it one with stage=route")
        if registry.tags(counted.version) is None:
            raise UserError(f"{where}: classes.{workload}.version={counted.version}: the registry has no such version")
    decisions = {workload: _decide(engines, workload, counted, limits, say) for workload, counted in snapshot.classes.items()}
    moves = [decision.move for decision in decisions.values() if decision.move is not None]
    make_moves(engines.log, f"snapshot {file_digest(absolute(str(limits.snapshot)))[:12]}", moves)
    for workload, decision in decisions.items():
        say(f"{alias_of(workload)}: {decision.text}")
    broken = [workload for workload, decision in decisions.items() if decision.refused]
    if broken:
        raise GateRefusal(f"{where}: {', '.join(broken)}: broken; the lines above say what was done")


def _decide(engines: Engines, workload: str, counted: ClassSnapshot, limits: MonitorConfig, say: Say) -> Decision:
    before = read_aliases(engines.log.registry, workload)
    if counted.version != before.now:
        return Decision(f"stays at version {before.now}, since the snapshot is of version {counted.version}")
    readings = read_monitors(counted, limits)
    for reading in readings:
        say(f"{workload}: {reading.name} {reading.status}: {reading.text}")
    why = "; ".join(f"{reading.name}: {reading.text}" for reading in readings if reading.status == "broken")
    broken = {reading.kind for reading in readings if reading.status == "broken"}
    try:
        # Slow requests under memory pressure wait for memory, and the engine before holds less.
        if "quality" in broken or broken == {"latency"}:
            move = way_back(engines, workload, before, why)
            return Decision(str(move), move, refused=True)
        if "memory" in broken:
            now = engines.find(next(one for one in engines.registered() if one.number == before.now))
            smaller = step_down(engines, now, workload, quality_holds(readings), say)
            why = f"{why}; {smaller.candidate.name} takes {step(now, smaller).text}"
            move = Move(workload, before, before.moved_to(smaller.version), why, {smaller.version: smaller.report})
            return Decision(str(move), move)
    except GateRefusal as error:
        return Decision(f"stays at version {before.now}: {error} ({why})", refused=True)
    return Decision(f"stays at version {before.now}")
