"""Moves of routes: aliases of the registered model, two for each class.

`route-CLASS` is the engine that serves the class, and `route-CLASS-previous` its predecessor. Servers read the first alias.

A command decides on the aliases that it read. If an alias was moved meanwhile, the command moves nothing. The serving alias is
written last, so that a killed command leaves a way back, and running it again completes the move.

If a route moves back from a version, the registered model's tag `left-CLASS` gets the version: no monitor chooses it for this
class again until a routing file names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.registry.promotion import Registry
from pipeline.registry.routing.files import PREVIOUS
from pipeline.registry.tracking import RegisteredModel
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal


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
