"""Moves of routes: aliases of the registered model, three for each class.

`route-CLASS` is the engine that serves the class, and `route-CLASS-previous` its predecessor. A broken route without a
predecessor moves to `route-CLASS-fallback`. Servers read the first alias.

A command decides on the aliases that it read. If an alias was moved meanwhile, the command moves nothing. The serving alias is
written last, so that a killed command leaves a way back, and running it again completes the move.

If a route moves back from a version, the registered model's tag `left-CLASS` gets the version: no monitor chooses it for this
class again until a routing file names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.registry.promotion import Registry
from pipeline.registry.tracking import RegisteredModel
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal


@dataclass(frozen=True)
class Aliases:
    now: str | None
    previous: str | None = None
    fallback: str | None = None

    def moved_to(self, version: str) -> "Aliases":
        """Return the aliases after a move to a version. The engine that served before becomes the previous engine."""
        before = self.now if self.now not in (None, version) else self.previous
        return replace(self, now=version, previous=before if before != version else None)

    def named(self, workload: str) -> dict[str, str | None]:
        alias = alias_of(workload)
        return {alias: self.now, f"{alias}-previous": self.previous, f"{alias}-fallback": self.fallback}


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
    """Return the move to the previous engine of a class, or to its fallback if no previous engine can serve.

    These engines were proven when they were routed. They are not replayed, because a broken engine must not wait for that.
    """
    before, problems = aliases_of(model, workload), []
    for name, version in (("previous", before.previous), ("fallback", before.fallback)):
        if version is None or version == before.now:
            problems.append(f"no {name}")
        elif version not in model.versions:
            problems.append(f"its {name}, version {version}, was deleted")
        else:
            after = replace(before, now=version, previous=None)
            return Move(workload, before, after, f"{why}; to its {name}", back=True)
    raise GateRefusal(f"{alias_of(workload)} cannot go back: {', '.join(problems)}")


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
