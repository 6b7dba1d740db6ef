"""stage=route and stage=monitor: their decisions, and the lines that they print.

A monitor compares a share of good requests with its minimum, by exact one-sided bounds (Clopper-Pearson at ALPHA). It is
**broken** if the upper bound is below the minimum. It **holds** if the lower bound reaches the minimum. Otherwise it is
**unknown**: the number of requests is insufficient. Noise moves nothing. The bounds assume independent requests.

Under memory pressure a class moves to the next smaller engine. Old values lose precision first and keys last: keys decide where
attention looks, while values are averaged, which reduces their error. The candidates hold more live tokens than the present
engine in the same memory, over the same baseline (so with the same model, weights and backend). They are tried in this order:

1. Engines that do not change the keys come first. Others are allowed only if every monitor of quality is shown to hold.
2. Within these groups, engines that do not change the values of the latest tokens (a window) come first.
3. Within these groups, the engine with the fewest additional live tokens comes first: the smallest sufficient step.

A route is two aliases of the registered model: `route-CLASS` is the engine that serves the class, and `route-CLASS-previous`
its predecessor. Servers read the first alias. A command decides on the aliases that it read. If an alias was moved meanwhile,
the command moves nothing. The serving alias is written last, so that a killed command leaves a way back, and running it again
completes the move. If a route moves back from a version, the registered model's tag `left-CLASS` gets the version: no monitor
chooses it for this class again until `routing.routes` names it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pipeline.registry.promotion import Engines, RegisteredEngine, Registry
from pipeline.registry.routing.files import PREVIOUS, ClassSnapshot, MonitorConfig, Share, read_snapshot
from pipeline.registry.tracking import RegisteredModel
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.policies.policy import KVPolicy
from stages.workloads.config import Workload


@dataclass(frozen=True)
class Aliases:
    now: str | None
    previous: str | None = None

    def moved_to(self, version: str) -> "Aliases":
        """Return the aliases after a move to a version. The engine that served before becomes the previous engine."""
        before = self.now if self.now not in (None, version) else self.previous
        return Aliases(version, before if before != version else None)

    def named(self, workload: str) -> dict[str, str | None]:
        return {alias_of(workload): self.now, f"{alias_of(workload)}{PREVIOUS}": self.previous}


@dataclass(frozen=True)
class Move:
    """A change of a class's aliases, with the aliases that the decision was based on."""

    workload: str
    before: Aliases
    after: Aliases
    why: str
    back: bool = False
    """Whether the move leaves a broken engine."""

    def __str__(self) -> str:
        return f"version {self.before.now or 'none'} -> {self.after.now}: {self.why}"


def alias_of(workload: str) -> str:
    return f"route-{workload}"


def aliases_of(model: RegisteredModel, workload: str) -> Aliases:
    return Aliases(*map(model.aliases.get, Aliases(None).named(workload)))


def way_back(model: RegisteredModel, workload: str, why: str) -> Move:
    """Return the move to the previous engine of a class. Raises GateRefusal if this engine cannot serve.

    The engine was proven when it was routed. It is not replayed, because a broken engine must not wait for that.
    """
    before = aliases_of(model, workload)
    if before.previous is None or before.previous not in model.versions:
        gone = "it has no previous engine" if before.previous is None else f"version {before.previous} was deleted"
        raise GateRefusal(f"{alias_of(workload)} cannot go back: {gone}")
    return Move(workload, before, Aliases(before.previous), f"{why}; to its previous engine", back=True)


def make_moves(registry: Registry, moves: Sequence[Move]) -> None:
    """Make all moves back, then all others. Raises GateRefusal if another command moved an alias meanwhile."""
    for group in filter(None, ([move for move in moves if move.back is back] for back in (True, False))):
        with locked(registry.lock, "moving routes"):
            now = registry.read()
            for move in group:
                if aliases_of(now, move.workload) != move.before:
                    raise GateRefusal(f"{alias_of(move.workload)} was moved meanwhile: it was left unchanged; run it again")
            for move in group:
                _make(registry, move, now.left(move.workload))


def _make(registry: Registry, move: Move, left: set[str]) -> None:
    versions = left | set(filter(None, [move.before.now])) if move.back else left - {move.after.now}
    if versions != left:
        registry.set_left(move.workload, versions)
    before, after = move.before.named(move.workload), move.after.named(move.workload)
    # The serving alias has the shortest name and is set last. Deletions follow.
    for alias, number in sorted(after.items(), key=lambda item: (item[1] is None, -len(item[0]))):
        if number != before[alias]:
            registry.set_alias(alias, number)


class RoutingStep(NamedTuple):
    """The changes that a smaller engine would bring. The smallest change sorts first."""

    keys: bool
    recent_values: bool
    gained: int

    def __str__(self) -> str:
        what = "keys and values" if self.keys else "values" if self.recent_values else "old values alone"
        return f"{what}, {self.gained:,} live tokens more in the same memory"


def step(now: RegisteredEngine, to: RegisteredEngine) -> RoutingStep:
    one, other = now.policy, to.policy
    fewer = other.sink_tokens < one.sink_tokens or other.recent_tokens < one.recent_tokens
    keys, values = (stored(one) != stored(other) or fewer for stored in (_keys, _recent_values))
    return RoutingStep(keys, values, to.live_tokens - now.live_tokens)


def _keys(policy: KVPolicy) -> tuple[object, ...]:
    """Return everything that decides how keys are stored, except exact tokens."""
    window = (policy.window.tokens, policy.window.key) if policy.window is not None and policy.window.key is not None else None
    return policy.key, window, {layer: one.key for one in policy.overrides if one.key is not None for layer in one.layers}


def _recent_values(policy: KVPolicy) -> tuple[object, ...]:
    """Return how the latest tokens' values are stored, and the overrides of single layers."""
    window = policy.window.value if policy.window is not None else None
    overrides = {layer: one.value for one in policy.overrides if one.value is not None for layer in one.layers}
    return window or policy.value, overrides


def step_down(
    engines: Engines, now: RegisteredEngine, workload: str, quality_holds: bool, say: Callable[[str], None]
) -> RegisteredEngine:
    """Return the first engine, in the module's order, that is proven for the class. Rejections are reported to `say`."""
    larger = list[RegisteredEngine]()
    broken = set[str]()
    left = engines.model.left(workload)
    for version in engines.model.versions.values():
        if version.tags.get("verdict") != "PASS" or version.number == now.version:
            continue
        try:
            engine = engines.find(version)
        except GateRefusal as error:
            say(f"{workload}: not {error}")
            continue
        if engine.candidate.baseline.digest != now.candidate.baseline.digest:
            continue
        if version.number in left:
            broken.add(engine.candidate.report.digest)
        if engine.live_tokens > now.live_tokens:
            larger.append(engine)
    for engine in sorted(larger, key=lambda engine: (step(now, engine), -int(engine.version))):
        try:
            if engine.candidate.report.digest in broken:
                raise GateRefusal("was rolled back")
            if step(now, engine).keys and not quality_holds:
                raise GateRefusal("its keys lose too, and not every monitor of quality is shown to hold")
            prove(engines, engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            say(f"{workload}: not {engine}: {error}")
        else:
            return engine
    raise GateRefusal(f"no smaller engine is proven for {workload}")


ALPHA = 0.001
"""One-sided error per monitor and snapshot: how often a class that is exactly at a limit counts as broken."""
Status = Literal["holds", "broken", "unknown"]
Kind = Literal["latency", "quality", "memory"]


@dataclass(frozen=True)
class Reading:
    kind: Kind
    """JSON validity and `canaries` are of kind quality. A broken memory monitor means memory pressure. It is never unknown,
    because all tokens are counted."""
    name: str
    status: Status
    text: str


def quality_holds(readings: Sequence[Reading]) -> bool:
    """Return whether monitors of quality exist and all are shown to hold."""
    return {reading.status for reading in readings if reading.kind == "quality"} == {"holds"}


def _bounds(share: Share) -> tuple[float, float]:
    """Return the exact one-sided 1 - ALPHA bounds of a share (Clopper-Pearson), the lower one first."""
    from scipy.special import betaincinv

    good, bad = share.good, share.of - share.good
    lower = float(betaincinv(good, bad + 1, ALPHA)) if good else 0.0
    return lower, float(betaincinv(good + 1, bad, 1 - ALPHA)) if bad else 1.0


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> list[Reading]:

    def reading(kind: Kind, name: str, share: Share, least: float) -> Reading:
        lower, upper = _bounds(share)
        status: Status = "broken" if upper < least else "holds" if lower >= least else "unknown"
        bounds = f"{100 * (1 - ALPHA):g} % bounds {lower:.4f} to {upper:.4f}"
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


def find_engine(engines: Engines, name: str, key: str) -> RegisteredEngine:
    """Return the latest version with this name, or the version with this number.

    `key` is the key of the name, for messages.
    """
    versions = engines.model.versions.values()
    named = [one for one in versions if name in (one.number, one.name)]
    if not named:
        known = ", ".join(sorted({one.tags.get("kv", "") for one in versions} - {""})) or "none"
        raise UserError(f"{key}={name}: no registered engine has this name; there are {known}")
    try:
        return engines.find(max(named, key=lambda one: int(one.number)))
    except GateRefusal as error:
        raise GateRefusal(f"{key}={name}: {error}") from error


def prove(engines: Engines, engine: RegisteredEngine, workload: str) -> None:
    """Check the engine's evidence again, and check that it covers the class."""
    checks = engines.verify(engine.candidate).checks
    lines = [check for check in checks if check.where == workload or check.where.startswith(f"{workload} [")]
    if not lines or workload not in engine.workloads:
        raise GateRefusal(f"its report has not judged {workload}; it judged {', '.join(sorted(engine.workloads))}")
    for line in lines:
        if line.status not in ("PASS", "WARNING"):
            raise GateRefusal(f"{workload} is {line.status}: {line.reason}")


def route(engines: Engines, routes: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Set the routes of `routing.routes`. Other classes keep their routes.

    Raises:
        UserError: kvgate knows no such class, and no named engine was judged on it; or no engine has a name.
        GateRefusal: an engine is not proven for its class.
    """
    named = {workload: find_engine(engines, name, f"routing.routes.{workload}") for workload, name in routes.items()}
    judged = {workload for engine in named.values() for workload in engine.workloads}
    for workload in named:
        if workload not in {*get_args(Workload), *judged}:
            choices = ", ".join(sorted(judged or get_args(Workload)))
            raise UserError(f"routing.routes.{workload}: no such class; these engines were judged on {choices}")
    moves, lines = [], []
    for workload, engine in named.items():
        try:
            prove(engines, engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            where = f"routing.routes.{workload}={engine.candidate.name}"
            raise error.with_message(f"{where}: version {engine.version} is not proven: {error}") from error
        before = aliases_of(engines.model, workload)
        after = before.moved_to(engine.version)
        if after != before:
            moves.append(Move(workload, before, after, "by routing.routes"))
        lines.append(f"{alias_of(workload)}: {engine}{', as it was' if after == before else ''}")
    make_moves(engines.registry, moves)
    for line in lines:
        say(line)


def roll_back(engines: Engines, workload: str, say: Callable[[str], None]) -> None:
    """Bring the previous engine of a class back."""
    if aliases_of(engines.model, workload).now is None:
        raise UserError(f"routing.rollback={workload}: this model has no such route; give a class that stage=status lists")
    try:
        move = way_back(engines.model, workload, "by hand")
    except GateRefusal as error:
        raise UserError(f"routing.rollback={workload}: {error}") from error
    make_moves(engines.registry, [move])
    say(f"{alias_of(workload)}: {move}")


def monitor(engines: Engines, limits: MonitorConfig, say: Callable[[str], None]) -> None:
    """Move routes according to a snapshot of the fleet: back if a monitor broke, down if memory is short."""
    snapshot, where = read_snapshot(limits), f"monitor.snapshot={limits.snapshot}"
    for workload, counted in snapshot.classes.items():
        if aliases_of(engines.model, workload).now is None:
            raise UserError(f"{where}: classes.{workload}: this model has no such route; give it one with stage=route")
        if counted.version not in engines.model.versions:
            raise UserError(f"{where}: classes.{workload}.version={counted.version}: the registry has no such version")
    decisions = {workload: _decide(engines, workload, counted, limits, say) for workload, counted in snapshot.classes.items()}
    make_moves(engines.registry, [move for move in decisions.values() if isinstance(move, Move)])
    for workload, decision in decisions.items():
        say(f"{alias_of(workload)}: {decision}")
    broken = [
        workload
        for workload, decision in decisions.items()
        if isinstance(decision, GateRefusal) or (isinstance(decision, Move) and decision.back)
    ]
    if broken:
        raise GateRefusal(f"{where}: {', '.join(broken)}: broken; the lines above have the details")


def _decide(
    engines: Engines, workload: str, counted: ClassSnapshot, limits: MonitorConfig, say: Callable[[str], None]
) -> Move | GateRefusal | str:
    """Return the move of a class, a refusal if a monitor broke and no move can help, or a clause that the class stays."""
    before = aliases_of(engines.model, workload)
    if counted.version != before.now:
        return f"stays at version {before.now}, since the snapshot is of version {counted.version}"
    readings = read_monitors(counted, limits)
    for reading in readings:
        say(f"{workload}: {reading.name} {reading.status}: {reading.text}")
    why = "; ".join(f"{reading.name}: {reading.text}" for reading in readings if reading.status == "broken")
    broken = {reading.kind for reading in readings if reading.status == "broken"}
    try:
        # Under memory pressure, requests are slow because they wait for memory. The previous engine would hold even less.
        if "quality" in broken or broken == {"latency"}:
            return way_back(engines.model, workload, why)
        if "memory" in broken:
            now = engines.find(engines.model.versions[counted.version])
            smaller = step_down(engines, now, workload, quality_holds(readings), say)
            why = f"{why}; {smaller.candidate.name} takes {step(now, smaller)}"
            return Move(workload, before, before.moved_to(smaller.version), why)
    except GateRefusal as error:
        return GateRefusal(f"stays at version {before.now}: {error} ({why})")
    return f"stays at version {before.now}"
