"""Moves of routes: aliases of the registered model, a few for each class.

`route-CLASS` is the engine that serves the class, `route-CLASS-previous` the one before, `route-CLASS-fallback` the one that a
broken route goes to where there is none before. Servers read the first.

Moves of one command are one record of the log of moves (`pipeline.trust.movelog` says what its lock covers), from the
aliases on which they were decided: where those moved meanwhile, nothing is moved. The record decides for all classes at once.
A command that is killed, or fails, before every alias has followed leaves the rest to the next one that reads them. An MLflow
run says what was moved, and why; it is opened before the record, so that a move which failed has one too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.core.errors import GateRefusal
from pipeline.routing.engines import RouteRegistry
from pipeline.trust.movelog import MoveLog, Registry, mover, now


@dataclass(frozen=True)
class Aliases:
    """Versions that the aliases of a class point at."""

    now: str | None
    previous: str | None = None
    fallback: str | None = None

    def moved_to(self, version: str) -> "Aliases":
        """Return them after a move to a version: what served before is the previous one."""
        before = self.now if self.now not in (None, version) else self.previous
        return replace(self, now=version, previous=before if before != version else None)


ENDINGS = {"fallback": "-fallback", "previous": "-previous", "now": ""}
"""Field of Aliases -> ending of the alias."""


@dataclass(frozen=True)
class Move:
    """One class, from the aliases on which it was decided to others."""

    workload: str
    before: Aliases
    after: Aliases
    why: str
    proven: Mapping[str, str] = field(default_factory=dict)
    """Versions whose evidence was replayed for this class -> digest of their report."""
    back: bool = False
    """Whether it leaves a broken engine, which no monitor chooses for the class again."""

    def __str__(self) -> str:
        return f"version {self.before.now or 'none'} -> {self.after.now}: {self.why}"


def alias_of(workload: str) -> str:
    """Return the alias that servers read."""
    return f"route-{workload}"


def proven_tag(workload: str) -> str:
    """Return the tag of a version whose evidence was replayed for a class; its value is the report's digest."""
    return f"proven-{workload}"


def rolled_back_tag(workload: str) -> str:
    """Return the tag of a version that was left because it broke; empty once a routing file named it again."""
    return f"rolled-back-{workload}"


def read_aliases(registry: Registry, workload: str) -> Aliases:
    """Return where the aliases of a class point."""
    return Aliases(**{name: registry.alias(alias_of(workload) + ending) for name, ending in ENDINGS.items()})


def way_back(registry: Registry, workload: str, before: Aliases, why: str) -> Move:
    """Return the move to the previous engine of a class, or to its fallback where no previous one can serve.

    It takes no replay: these were proven for the class when they were routed, and a broken engine must not wait for one.

    Raises:
        GateRefusal: when neither can serve.
    """
    problems = []
    for name, version in (("previous", before.previous), ("fallback", before.fallback)):
        if version is None or version == before.now:
            problems.append(f"no {name}")
            continue
        tags = registry.tags(version)
        if tags is None:
            problems.append(f"its {name}, version {version}, was deleted")
        elif not tags.get("report_digest") or tags.get(proven_tag(workload)) != tags["report_digest"]:
            problems.append(f"its {name}, version {version}, was never proven for {workload}")
        else:
            return Move(workload, before, replace(before, now=version, previous=None), f"{why}; to its {name}", back=True)
    raise GateRefusal(f"{alias_of(workload)} cannot go back: {', '.join(problems)}")


def make_moves(log: MoveLog, registry: RouteRegistry, title: str, moves: Sequence[Move], tags: Mapping[str, str]) -> None:
    """Make all moves, or none.

    Args:
        log: The log of moves of the registry.
        registry: Where the aliases are.
        title: Of the run that records them.
        moves: At most one for each class.
        tags: What that run says besides.

    Raises:
        GateRefusal: when an alias was moved by somebody else.
    """
    if not moves:
        return
    said = {**tags, **{f"move/{move.workload}": str(move) for move in moves}}
    with log.changing(urgent=all(move.back for move in moves)) as history, registry.recorded(title, said):
        for move in moves:
            if read_aliases(registry, move.workload) != move.before:
                raise GateRefusal(f"{alias_of(move.workload)} was moved meanwhile: nothing was moved; run it again")
            for version, digest in move.proven.items():
                registry.set_tags(version, {proven_tag(move.workload): digest})
        before = {alias: version for move in moves for alias, version in _targets(move.workload, move.before).items()}
        after = {alias: version for move in moves for alias, version in _targets(move.workload, move.after).items()}
        changed = {alias: version for alias, version in after.items() if version != before[alias]}
        why = f"{title}: " + "; ".join(f"{move.workload} {move}" for move in moves)
        was = {alias: before[alias] for alias in changed}
        log.append(history, "route", why, aliases=changed, before=was, tags=_left(moves, registry))
        for move in moves:
            assert move.after.now is not None, "a move leads to a version"
            registry.set_tags(move.after.now, {alias_of(move.workload): f"{now()} by {mover()}: {move}"})


def _targets(workload: str, aliases: Aliases) -> dict[str, str | None]:
    """Return the aliases of a class by their full names."""
    return {alias_of(workload) + ending: getattr(aliases, name) for name, ending in ENDINGS.items()}


def _left(moves: Sequence[Move], registry: RouteRegistry) -> dict[str, dict[str, str]]:
    """Return tags by version: of those that were left because they broke, and of those that are named again."""
    tags: dict[str, dict[str, str]] = {}
    for move in moves:
        tag, to = rolled_back_tag(move.workload), move.after.now
        if move.back and move.before.now is not None:
            tags.setdefault(move.before.now, {})[tag] = now()
        elif not move.back and to is not None and (registry.tags(to) or {}).get(tag):
            tags.setdefault(to, {})[tag] = ""
    return tags
