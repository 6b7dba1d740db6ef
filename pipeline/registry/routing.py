"""stage=route and stage=monitor decide which engine serves each workload. In this module a workload is called a class.

`route`, `roll_back` and `monitor` yield lines to print. Under memory pressure, a class moves to a smaller engine. A smaller
engine holds more live tokens in the same memory, and was judged against the same baseline (so with the same model, weights and
backend). Smaller engines are tried in the order of `EngineChange`: old values lose precision first and keys last, because keys
decide where attention looks, while values are averaged, which reduces their error. An engine that changes the keys is allowed
only if all quality monitors hold.

The alias `route-CLASS` of the registered model is the engine that serves a class (`pipeline.registry.moves`). If a route moves
back from a version, the registered model's tag `left-CLASS` gets the version: no monitor chooses it for this class again until
`routing.routes` names it.

A monitor of latency or quality compares a share of good requests with its minimum, by exact one-sided bounds (Clopper-Pearson
at MONITOR_ALPHA). The monitor is **broken** if the upper bound is below the minimum. It **holds** if the lower bound reaches
the minimum. Otherwise it is **unknown**: there are too few requests. An unknown monitor alone moves no route. The bounds assume
independent requests. The memory monitor needs no bounds: it compares the share of live tokens with its maximum.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from pipeline.config.config import ClassName, MonitorConfig
from pipeline.registry.moves import Move, make_moves, route_back, route_of
from pipeline.registry.promotion import ROLLED_BACK_AT, Engines, RegisteredEngine, live_tokens
from pipeline.registry.tracking import RegisteredModel
from stages.core.errors import GateRefusal, MissingRequirement, UserError, short
from stages.core.strict import StrictModel, Unreadable, absolute_path, first_problem, parse_json, read_file
from stages.policies.policy import KVPolicy, Side
from stages.workloads.config import Workload

MAX_BYTES = 1_000_000
MAX_AGE_S = 900
"""Maximum seconds between now and `taken_at` of a snapshot."""
MONITOR_ALPHA = 0.001
"""One-sided error per monitor and snapshot: the maximum probability that a class exactly at its limit counts as broken."""

Count = Annotated[int, Field(ge=0, le=1 << 53)]


class GoodRequests(StrictModel):
    """Number of good requests, out of all counted requests."""

    good: Count
    of: Count

    @model_validator(mode="after")
    def _is_a_share(self) -> Self:
        if self.good > self.of:
            raise ValueError(f"good={self.good} must not be more than of={self.of}")
        return self


class Latency(GoodRequests):
    """Good requests took at most `limit_ms`."""

    limit_ms: Annotated[float, Field(gt=0)]


class Memory(StrictModel):
    live_tokens: Count
    max_tokens: Annotated[int, Field(ge=1, le=1 << 53)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.live_tokens > self.max_tokens:
            raise ValueError(f"live_tokens={self.live_tokens} must not be more than max_tokens={self.max_tokens}")
        return self


class ClassSnapshot(StrictModel):
    """Counts of one class. A monitor that the class does not use must be null; a missing monitor is an error."""

    version: str
    latency: Latency
    json_validity: GoodRequests | None
    canaries: GoodRequests | None
    memory: Memory


class Snapshot(StrictModel):
    taken_at: AwareDatetime
    classes: Annotated[dict[ClassName, ClassSnapshot], Field(min_length=1)]


def read_snapshot(monitor: MonitorConfig) -> Snapshot:
    """Read the snapshot. Raises UserError for its first problem, or if `taken_at` is more than MAX_AGE_S seconds from now."""
    where = f"monitor.snapshot={monitor.snapshot}"
    try:
        content = read_file(absolute_path(str(monitor.snapshot)), MAX_BYTES)
        parse_json(content)  # refuses repeated keys, of which pydantic takes the last
        snapshot = Snapshot.model_validate_json(content)
    except Unreadable as error:
        raise UserError(f"{where}: {error}") from None
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}; correct it") from None
    taken_at = snapshot.taken_at
    away = abs((datetime.now(UTC) - taken_at).total_seconds())
    if away > MAX_AGE_S:
        raise UserError(
            f"{where}: taken_at={taken_at.isoformat()} is {away:,.0f} s from now, more than {MAX_AGE_S}; take a new one"
        )
    return snapshot


class Reading(NamedTuple):
    """State of one monitor. The memory monitor is broken under memory pressure, and never unknown: it counts all tokens."""

    kind: Literal["latency", "quality", "memory"]
    name: str
    status: Literal["holds", "broken", "unknown"]
    text: str


def quality_holds(readings: Sequence[Reading]) -> bool:
    """Return whether monitors of quality exist and all are shown to hold."""
    return {reading.status for reading in readings if reading.kind == "quality"} == {"holds"}


def _share_reading(kind: Literal["latency", "quality"], name: str, counted: GoodRequests, min_share: float) -> Reading:
    from scipy.special import betaincinv

    good, bad = counted.good, counted.of - counted.good
    lower = float(betaincinv(good, bad + 1, MONITOR_ALPHA)) if good else 0.0
    upper = float(betaincinv(good + 1, bad, 1 - MONITOR_ALPHA)) if bad else 1.0
    bounds = f"{100 * (1 - MONITOR_ALPHA):g} % bounds {lower:.4f} to {upper:.4f}"
    text = f"{good:,} of {counted.of:,}, {bounds}, minimum {min_share:g}"
    return Reading(kind, name, "broken" if upper < min_share else "holds" if lower >= min_share else "unknown", text)


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> list[Reading]:
    latency, memory, max_share = snapshot.latency, snapshot.memory, limits.max_live_share
    readings = [_share_reading("latency", f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit)]
    if snapshot.json_validity is not None:
        readings.append(_share_reading("quality", "JSON validity", snapshot.json_validity, limits.min_json_validity))
    if snapshot.canaries is not None:
        readings.append(_share_reading("quality", "canaries", snapshot.canaries, limits.min_canary_accuracy))
    pressure = memory.live_tokens / memory.max_tokens > max_share
    tokens = f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {max_share:.0%}"
    return [*readings, Reading("memory", "memory", "broken" if pressure else "holds", tokens)]


def alias_of(workload: str) -> str:
    return f"route-{workload}"


def move_to(engines: Engines, workload: str, version: str, why: str) -> Move:
    """Return the move of a class to a version. The version may be chosen by monitors again."""
    left, before = engines.model.left(workload) - {version}, route_of(engines.model, alias_of(workload))
    record = partial(engines.registry.set_left, workload, left)
    return Move(alias_of(workload), before, before.moved_to(version), record, why)


def move_to_previous(engines: Engines, workload: str, why: str) -> Move:
    """Return the move to the previous engine of a class. Raises GateRefusal if there is none.

    The engine was proven when it was routed. It is not replayed, because a broken engine must not wait for that.
    """
    before, after = route_of(engines.model, alias_of(workload)), route_back(engines.model, alias_of(workload))
    record = partial(engines.registry.set_left, workload, engines.model.left(workload) | {str(before.now)})
    return Move(alias_of(workload), before, after, record, f"{why}; to its previous engine", back=True)


class EngineChange(NamedTuple):
    """The changes that a smaller engine would bring. The smallest change sorts first."""

    keys: bool
    recent_values: bool
    gained: float
    """Additional live tokens in the same memory."""

    def __str__(self) -> str:
        what = "keys and values" if self.keys else "values" if self.recent_values else "old values alone"
        return f"{what} and holds {self.gained:,.0f} more live tokens in the same memory"


def step(now: RegisteredEngine, to: RegisteredEngine) -> EngineChange:
    def overrides(policy: KVPolicy, side: Side) -> dict[int, object]:
        return {layer: form for part in policy.overrides if (form := part.form(side)) is not None for layer in part.layers}

    def keys(policy: KVPolicy) -> object:
        window = policy.window if policy.window is not None and policy.window.key is not None else None
        return policy.key, window and (window.tokens, window.key), overrides(policy, Side.KEY), policy.eviction

    def recent_values(policy: KVPolicy) -> object:
        return (policy.window and policy.window.value) or policy.value, overrides(policy, Side.VALUE)

    before, after = now.policy, to.policy
    fewer = after.sink_tokens < before.sink_tokens or after.recent_tokens < before.recent_tokens  # exact tokens
    gained = live_tokens(to.candidate) - live_tokens(now.candidate)
    return EngineChange(keys(before) != keys(after) or fewer, recent_values(before) != recent_values(after) or fewer, gained)


def step_down(
    engines: Engines, now: RegisteredEngine, workload: str, readings: Sequence[Reading]
) -> Generator[str, None, RegisteredEngine]:
    """Yield a line for each rejected engine; return the first smaller proven engine. Raises GateRefusal if none is."""
    smaller = list[RegisteredEngine]()
    broken = set[str]()
    rolled_back = engines.model.left(workload)
    for version in engines.model.versions.values():
        if version.tags.get("verdict") != "PASS" or version.number == now.candidate.version:
            continue
        try:
            engine = engines.find(version)
        except GateRefusal as error:
            yield f"{workload}: not {error}"
            continue
        if engine.candidate.baseline.digest != now.candidate.baseline.digest:
            continue
        if version.number in rolled_back or ROLLED_BACK_AT in version.tags:
            broken.add(engine.candidate.report.digest)
        if step(now, engine).gained > 0:
            smaller.append(engine)
    for engine in sorted(smaller, key=lambda engine: (step(now, engine), -int(engine.candidate.version))):
        try:
            if engine.candidate.report.digest in broken:
                raise GateRefusal("was rolled back")
            _refuse_later_fail(engines, engine)
            if step(now, engine).keys and not quality_holds(readings):
                raise GateRefusal("it changes the keys, which is allowed only if every quality monitor holds")
            prove(engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            yield f"{workload}: not {engine}: {error}"
        else:
            return engine
    raise GateRefusal(f"no smaller engine is proven for {workload}")


def _refuse_later_fail(engines: Engines, engine: RegisteredEngine) -> None:
    for version in engines.not_passed(engine.candidate):
        if version.tags["verdict"] == "FAIL" and int(version.number) > int(engine.candidate.version):
            raise GateRefusal(f"the same engine failed later, as version {version.number}")


def prove(engine: RegisteredEngine, workload: str) -> None:
    """Check the engine's evidence again, and check that it covers the class."""
    engine.verify()
    checks = engine.candidate.checks
    lines = [check for check in checks if check.where == workload or check.where.startswith(f"{workload} [")]
    if not lines or workload not in engine.workloads:
        raise GateRefusal(f"it was not judged on {workload}, only on {', '.join(sorted(engine.workloads))}")
    for line in lines:
        if line.status not in ("PASS", "WARNING"):
            raise GateRefusal(f"{workload} is {line.status}: {line.reason}")


def _find_engine(engines: Engines, workload: str, name: str) -> RegisteredEngine:
    key, versions = f"routing.routes.{workload}={name}", engines.model.versions.values()
    matches = [version for version in versions if name in (version.number, version.name)]
    if not matches:
        choices = ", ".join(sorted({version.tags.get("kv", "") for version in versions} - {""})) or "none"
        raise UserError(f"{key}: no registered engine has this name; there are {choices}")
    try:
        return engines.find(max(matches, key=lambda version: int(version.number)))
    except GateRefusal as error:
        raise GateRefusal(f"{key}: {error}") from error


def route(engines: Engines, routes: Mapping[str, str]) -> Iterator[str]:
    """Set the routes of `routing.routes`. Other classes keep their routes.

    Raises UserError if a name matches no engine, or a class is no built-in workload and none of its engine's; GateRefusal if an
    engine is not proven for its class.
    """
    engines_of = {workload: _find_engine(engines, workload, name) for workload, name in routes.items()}
    moves, lines = [], []
    for workload, engine in engines_of.items():
        if workload not in {*get_args(Workload), *engine.workloads}:
            choices = ", ".join(sorted(engine.workloads))
            raise UserError(f"routing.routes.{workload}: no such class; {engine} was judged on {choices}; give one of them")
        try:
            prove(engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            where = f"routing.routes.{workload}={engine.candidate.name}"
            raise type(error)(f"{where}: version {engine.candidate.version} is not proven: {error}") from error
        moves.append(move_to(engines, workload, engine.candidate.version, "by routing.routes"))
        lines.append(f"{alias_of(workload)}: {engine}{', as it was' if moves[-1].after == moves[-1].before else ''}")
    make_moves(engines.registry, moves)
    yield from lines


def roll_back(engines: Engines, workload: str) -> Iterator[str]:
    if alias_of(workload) not in engines.model.aliases:
        raise UserError(f"routing.rollback={workload}: this model has no such route; give a class that stage=status lists")
    try:
        move = move_to_previous(engines, workload, "by hand")
    except GateRefusal as error:
        raise UserError(f"routing.rollback={workload}: {error}") from error
    make_moves(engines.registry, [move])
    yield f"{alias_of(workload)}: {move}"


def monitor(engines: Engines, limits: MonitorConfig) -> Iterator[str]:
    """Move routes by a snapshot of the servers.

    A route moves back to its previous engine if a quality monitor is broken, or if only the latency monitor is broken. A route
    moves down to a smaller engine if the memory monitor is broken and no quality monitor is. Raises UserError if the snapshot
    is unusable, or names a class without a route or an unknown version; GateRefusal if a route moved back, or a broken monitor
    requires a move that is not possible.
    """
    snapshot, where = read_snapshot(limits), f"monitor.snapshot={limits.snapshot}"
    _check_classes(engines.model, snapshot, where)
    decisions = dict[str, Move | str]()
    broken = set[str]()
    for workload, counted in snapshot.classes.items():
        current = engines.model.aliases[alias_of(workload)]
        stays = f"stays at version {current}"
        if counted.version != current:
            decisions[workload] = f"{stays}, since the snapshot is of version {counted.version}"
            continue
        readings = read_monitors(counted, limits)
        yield from (f"{workload}: {reading.name} {reading.status}: {reading.text}" for reading in readings)
        why = "; ".join(f"{reading.name}: {reading.text}" for reading in readings if reading.status == "broken")
        try:
            move = yield from _decide(engines, workload, readings, why)
            decisions[workload] = move or stays
        except GateRefusal as error:
            decisions[workload], move = f"{stays}: {error} ({why})", None
            broken.add(workload)
        if move is not None and move.back:
            broken.add(workload)
    # Moves back come first. Each move is made and printed by itself, so that a refused one stops no other.
    for workload, decision in sorted(decisions.items(), key=lambda item: not (isinstance(item[1], Move) and item[1].back)):
        refused = ""
        if isinstance(decision, Move):
            try:
                make_moves(engines.registry, [decision])
            except GateRefusal as error:
                refused = f"not moved ({error}): "
                broken.add(workload)
        yield f"{alias_of(workload)}: {refused}{decision}"
    if broken:
        raise GateRefusal(f"{where}: a monitor broke for {', '.join(sorted(broken))}; see the lines above")


def _check_classes(model: RegisteredModel, snapshot: Snapshot, where: str) -> None:
    """Refuse a snapshot with a class without a route, or of an unknown version."""
    known = short(", ".join(model.versions), 200)
    for workload, counted in snapshot.classes.items():
        if alias_of(workload) not in model.aliases:
            raise UserError(f"{where}: classes.{workload}: this model has no such route; give it one with stage=route")
        if counted.version not in model.versions:
            raise UserError(
                f"{where}: classes.{workload}.version={counted.version}: the registry has no such version; give one of {known}"
            )


def _decide(engines: Engines, workload: str, readings: Sequence[Reading], why: str) -> Generator[str, None, Move | None]:
    """Return the move of a class, or None if it stays. Raises GateRefusal if a monitor broke and no move can help."""
    broken = {reading.kind for reading in readings if reading.status == "broken"}
    # Under memory pressure, requests are slow because they wait for memory. The previous engine would hold even less.
    if "quality" in broken or broken == {"latency"}:
        return move_to_previous(engines, workload, why)
    if "memory" not in broken:
        return None
    now = engines.find(engines.model.pointed_at[alias_of(workload)])
    smaller = yield from step_down(engines, now, workload, readings)
    why = f"{why}; {smaller.candidate.name} changes {step(now, smaller)}"
    return move_to(engines, workload, smaller.candidate.version, why)
