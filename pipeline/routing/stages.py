"""stage=route and stage=monitor: what they decide, and the lines that they say."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.artifacts.digest import file_digest
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.strict import absolute
from pipeline.routing.downshift import step, step_down
from pipeline.routing.engines import Engine, Engines, check_classes
from pipeline.routing.files import DEFAULT, ClassSnapshot, MonitorConfig, RoutingConfig, read_routing_file, read_snapshot
from pipeline.routing.monitors import quality_holds, read_monitors
from pipeline.routing.moves import Move, alias_of, make_moves, read_aliases, way_back

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
