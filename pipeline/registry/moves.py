"""Moves of the aliases that servers read: `champion` with `previous`, and `route-CLASS` with `route-CLASS-previous`.

A command decides by the state of the registry at its first read. If another command has moved an alias since then, the command
moves nothing. A move writes its tags, then a new previous alias, then the serving alias, so that a killed command can be
repeated or undone.

MLflow has no compare-and-swap. The lock covers every process on this host that uses the same store (with SQLite) or the same
work directory (with a server), but no other hosts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config.config import PREVIOUS
from pipeline.registry.tracking import CHAMPION, RegisteredModel
from pipeline.store.locks import locked
from stages.core.errors import GateRefusal

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


class Route(NamedTuple):
    """The version that serves at an alias, and the version that served before."""

    now: str | None
    previous: str | None = None

    def moved_to(self, version: str) -> "Route":
        """Return the route after a move to a version. The version that served before becomes the previous one."""
        before = self.now if self.now not in (None, version) else self.previous
        return Route(version, before if before != version else None)


class Move(NamedTuple):
    """A change of a route, with the route that the decision was based on."""

    alias: str
    before: Route
    after: Route
    record: Callable[[], None]
    """Writes the tags of the move."""
    why: str = ""
    back: bool = False

    def __str__(self) -> str:
        return f"version {self.before.now or 'none'} -> {self.after.now}: {self.why}"


def previous_alias(alias: str) -> str:
    return "previous" if alias == CHAMPION else f"{alias}{PREVIOUS}"


def route_of(model: RegisteredModel, alias: str) -> Route:
    """Return a serving alias's versions; none is previous if both aliases have one version, as after a killed move."""
    now, previous = model.aliases.get(alias), model.aliases.get(previous_alias(alias))
    return Route(now, previous if previous != now else None)


def route_back(model: RegisteredModel, alias: str) -> Route:
    """Return the route after a move to the previous version. Raises GateRefusal if there is none."""
    now, previous = route_of(model, alias)
    if now is None or previous is None:
        raise GateRefusal(f"{alias} cannot go back: {'no engine serves' if now is None else 'it has no previous engine'}")
    return Route(previous)


def make_moves(registry: "MlflowStore", moves: Sequence[Move]) -> None:
    """Make all moves or none. Raises GateRefusal if another command made a different move of an alias meanwhile."""
    if not moves:
        return
    with locked(registry.lock, "moving aliases"):
        model = registry.read()
        moves = [move for move in moves if route_of(model, move.alias) != move.after]
        for move in moves:
            if route_of(model, move.alias) != move.before:
                raise GateRefusal(f"{move.alias}: another command moved it; nothing was changed; run it again")
        for alias, before, after, record, *_ in moves:
            record()
            if after.previous not in (None, before.previous):
                registry.set_alias(previous_alias(alias), after.previous)
            if after.now != before.now:
                registry.set_alias(alias, after.now)
            if after.previous is None and before.previous is not None:
                registry.set_alias(previous_alias(alias), None)
