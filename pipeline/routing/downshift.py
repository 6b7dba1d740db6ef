"""Under memory pressure: the next smaller engine for a class. Old values first, keys last.

Keys decide where attention looks, values are averaged by it: values lose less. Of the engines that hold more live tokens than
the present one in the same memory, over the same baseline (so of the same model, weights and backend), come, in this order:

1. those that leave the keys alone, before those that do not; the latter only where every monitor of quality is shown to hold,
2. among these, those that leave the values of the latest tokens alone (a window), before those that do not,
3. among these, the one that holds the fewest live tokens more: no further than it has to.

An engine that a rollback left is not chosen for the class again until a routing file names it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.errors import GateRefusal, MissingRequirement
from pipeline.core.kv import KVPolicy
from pipeline.registry.proof import PASS
from pipeline.routing.engines import Engine, Engines
from pipeline.routing.moves import alias_of


@dataclass(frozen=True, order=True)
class Step:
    """What a smaller engine would change; the least comes first."""

    keys: bool
    young_values: bool
    gained: int

    @property
    def text(self) -> str:
        what = "keys and values" if self.keys else "values" if self.young_values else "old values alone"
        return f"{what}, {self.gained:,} live tokens more in the same memory"


def step(now: Engine, to: Engine) -> Step:
    one, other = now.policy, to.policy
    fewer = other.sink_tokens < one.sink_tokens or other.recent_tokens < one.recent_tokens
    return Step(
        keys=_keys(one) != _keys(other) or fewer,
        young_values=_young_values(one) != _young_values(other) or fewer,
        gained=to.live_tokens - now.live_tokens,
    )


def _keys(policy: KVPolicy) -> tuple[object, ...]:
    """All that decides how keys are stored, but for exact tokens."""
    window = (policy.window.tokens, policy.window.key) if policy.window is not None and policy.window.key is not None else None
    return policy.key, window, {layer: one.key for one in policy.overrides if one.key is not None for layer in one.layers}


def _young_values(policy: KVPolicy) -> tuple[object, ...]:
    """How the values of the latest tokens are stored, and what single layers have instead."""
    window = policy.window.value if policy.window is not None else None
    overrides = {layer: one.value for one in policy.overrides if one.value is not None for layer in one.layers}
    return window or policy.value, overrides


def step_down(engines: Engines, now: Engine, workload: str, quality_holds: bool, say: Callable[[str], None]) -> Engine:
    """Return the first engine in the order that is proven for the class. `say` is told why those before it are not taken."""
    larger = list[Engine]()
    rolled_back = engines.log.read().rolled_back(alias_of(workload))
    for version in engines.registered():
        cites = version.tags.get("baseline_digest") == now.candidate.baseline.digest
        if version.tags.get("verdict") != PASS or not cites or version.number == now.version:
            continue
        try:
            engine = engines.find(version)
        except GateRefusal as error:
            say(f"{workload}: not {error}")
            continue
        if engine.report in rolled_back:
            say(f"{workload}: not {engine}: was rolled back")
        elif engine.load != now.load:
            say(f"{workload}: not {engine}: its live tokens are of another workloads.load")
        elif engine.live_tokens > now.live_tokens:
            larger.append(engine)
    for engine in sorted(larger, key=lambda engine: (step(now, engine), -int(engine.version))):
        try:
            if step(now, engine).keys and not quality_holds:
                raise GateRefusal("its keys lose too, and not every monitor of quality is shown to hold")
            engines.prove(engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            say(f"{workload}: not {engine}: {error}")
        else:
            return engine
    raise GateRefusal(f"no smaller engine is proven for {workload}")
