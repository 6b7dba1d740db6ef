"""stage=route and stage=monitor: what they decide, and the lines that they say."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.artifacts.digest import file_digest
from pipeline.core.errors import GateRefusal, UserError
from pipeline.routing.downshift import step, step_down
from pipeline.routing.engines import Engine, Engines, check_classes
from pipeline.routing.files import DEFAULT, ClassSnapshot, read_routing_file, read_snapshot
from pipeline.routing.monitors import Readings, read_monitors
from pipeline.routing.moves import Aliases, Move, alias_of, make_moves, read_aliases, way_back
from pipeline.routing.settings import MonitorConfig, RoutingConfig

Say = Callable[[str], None]


def route(engines: Engines, routing: RoutingConfig, say: Say) -> None:
    """Make the routes those of the routing file. Classes that it does not name stay as they are.

    Raises:
        UserError: for a class or an engine that nobody knows.
        GateRefusal: for an engine whose evidence does not hold, or is about other classes. Nothing was moved.
        MissingRequirement: when a library that the replay takes is not installed. Nothing was moved.
    """
    routes, named = read_routing_file(routing).by_class, dict[str, list[tuple[str, Engine]]]()
    for workload, entry in routes.items():
        key = f"routing.file: {'' if workload == DEFAULT else 'routes.'}{workload}"
        named[workload] = [(f"{key}.policy", engines.named(entry.policy, f"{key}.policy"))]
        if entry.fallback is not None:
            named[workload].append((f"{key}.fallback", engines.named(entry.fallback, f"{key}.fallback")))
    check_classes({workload: [engine for _, engine in listed] for workload, listed in named.items()})
    moves, lines = [], []
    for workload, listed in named.items():
        versions = [engine.version for _, engine in listed]
        if len(set(versions)) < len(versions):
            raise UserError(f"{listed[1][0]}: is version {versions[0]}, the policy itself; give another, or leave it out")
        proven = [engines.proven(engine, workload, key) for key, engine in listed]
        before = read_aliases(engines.registry, workload)
        fallback = versions[1] if len(versions) > 1 else None
        after = before.moved_to(versions[0])
        after = Aliases(after.now, after.previous, fallback)
        move = Move(workload, before, after, "the routing file", _digests(*proven))
        if after != before:
            moves.append(move)
        notes = (", as it was" if after == before else "") + (f"; fallback {proven[1]}" if fallback is not None else "")
        lines.append(f"{alias_of(workload)}: {proven[0]}{notes}")
    make_moves(engines.log, engines.registry, "route", moves, {"stage": "route", "routing_file": file_digest(routing.path)})
    for line in lines:
        say(line)


def roll_back(engines: Engines, workload: str, say: Say) -> None:
    """Bring the previous engine of a class back, or its fallback.

    Raises:
        UserError: when the class has no route, or nothing to go back to.
    """
    before = read_aliases(engines.registry, workload)
    if before.now is None:
        raise UserError(f"routing.rollback={workload}: this model has no such route")
    try:
        move = way_back(engines.registry, workload, before, "by hand")
    except GateRefusal as error:
        raise UserError(f"routing.rollback={workload}: {error}") from error
    make_moves(engines.log, engines.registry, "route back", [move], {"stage": "route"})
    say(f"{alias_of(workload)}: {move}")


@dataclass(frozen=True)
class Decision:
    """What a snapshot leads to in one class."""

    text: str
    move: Move | None = None
    refused: bool = False
    """Whether something broke: also where nothing can be done about it."""


def monitor(engines: Engines, limits: MonitorConfig, say: Say) -> None:
    """Move routes as a snapshot of the fleet asks: back where a monitor broke, down where memory is short.

    Raises:
        UserError: for a snapshot of classes without a route, or of versions that do not exist. Nothing was moved.
        GateRefusal: when a monitor broke, after the routes were moved.
    """
    snapshot, where = read_snapshot(limits), f"monitor.snapshot={limits.snapshot}"
    for workload, counted in snapshot.classes.items():
        if read_aliases(engines.registry, workload).now is None:
            raise UserError(f"{where}: classes.{workload}: this model has no such route; give it one with stage=route")
        if engines.registry.tags(counted.version) is None:
            raise UserError(f"{where}: classes.{workload}.version={counted.version}: the registry has no such version")
    decisions = {workload: _decide(engines, workload, counted, limits, say) for workload, counted in snapshot.classes.items()}
    moves = [decision.move for decision in decisions.values() if decision.move is not None]
    tags = {"stage": "monitor", "snapshot_digest": file_digest(limits.path)}
    make_moves(engines.log, engines.registry, "monitor", moves, tags)
    for workload, decision in decisions.items():
        say(f"{alias_of(workload)}: {decision.text}")
    broken = [workload for workload, decision in decisions.items() if decision.refused]
    if broken:
        raise GateRefusal(f"monitor.snapshot={limits.snapshot}: {', '.join(broken)}: broken; the lines above say what was done")


def _decide(engines: Engines, workload: str, counted: ClassSnapshot, limits: MonitorConfig, say: Say) -> Decision:
    before = read_aliases(engines.registry, workload)
    if counted.version != before.now:
        return Decision(f"stays at version {before.now}, since the snapshot is of version {counted.version}")
    readings = read_monitors(counted, limits)
    for reading in readings.all:
        say(f"{workload}: {reading.name} {reading.status}: {reading.text}")
    why = "; ".join(f"{reading.name}: {reading.text}" for reading in readings.all if reading.status == "broken")
    pressure = readings.memory.status == "broken"
    # Slow requests under memory pressure wait for memory, and the engine before holds less.
    if readings.quality_is_broken or (readings.latency.status == "broken" and not pressure):
        try:
            move = way_back(engines.registry, workload, before, why)
        except GateRefusal as error:
            return Decision(f"stays at version {before.now}: {error} ({why})", refused=True)
        return Decision(str(move), move, refused=True)
    if pressure:
        return _step_down(engines, workload, before, readings, why, say)
    return Decision(f"stays at version {before.now}")


def _step_down(engines: Engines, workload: str, before: Aliases, readings: Readings, why: str, say: Say) -> Decision:
    versions = {one.model_version: (one, tags) for one, tags in engines.registry.registered()}
    assert before.now is not None, "the class has a route"
    try:
        present = engines.find(*versions[before.now])
    except GateRefusal as error:
        return Decision(f"stays at version {before.now}: {error} ({why})", refused=True)
    smaller, passed_over = step_down(engines, present, workload, readings.quality_holds)
    for line in passed_over:
        say(f"{workload}: not {line}")
    if smaller is None:
        return Decision(f"stays at version {before.now}: no smaller engine is proven for {workload} ({why})", refused=True)
    text = f"{why}; {smaller.candidate.name} takes {step(present, smaller).text}"
    move = Move(workload, before, before.moved_to(smaller.version), text, _digests(smaller))
    return Decision(str(move), move)


def _digests(*engines: Engine) -> dict[str, str]:
    return {engine.version: engine.candidate.report.digest for engine in engines}
