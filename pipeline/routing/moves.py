"""Moves of routes: aliases of the registered model, a few for each class.

`route-CLASS` is the engine that serves the class, `route-CLASS-previous` the one before, `route-CLASS-fallback` the one that a
broken route goes to where there is none before. Servers read the first.

Moves of one command are made together under the lock that promotions take (`pipeline.registry.promotion` says what it covers),
from the aliases on which they were decided: where those moved meanwhile, nothing is moved. MLflow moves one alias at a time:
when one fails, those before it are put back. A process that is killed outright leaves every class whole, since `previous` is
set before the route moves and removed after it, and the same command completes the rest. An MLflow run says what was moved,
and why; it is opened before the first move, so that a move which failed has one too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from getpass import getuser

from pipeline.artifacts.locks import locked
from pipeline.core.errors import GateRefusal
from pipeline.registry.promotion import Registry, now
from pipeline.routing.engines import RouteRegistry


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
"""Field of Aliases -> ending of the alias, in the order in which they are set."""


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


def make_moves(registry: RouteRegistry, title: str, moves: Sequence[Move], tags: Mapping[str, str]) -> None:
    """Make all moves, or none.

    Args:
        registry: Where the aliases are.
        title: Of the run that records them.
        moves: At most one for each class.
        tags: What that run says besides.

    Raises:
        GateRefusal: when an alias was moved by somebody else.
    """
    if not moves:
        return
    record = {**tags, **{f"move/{move.workload}": str(move) for move in moves}}
    with locked(registry.lock, "moving routes"), registry.recorded(title, record):
        for move in moves:
            if read_aliases(registry, move.workload) != move.before:
                raise GateRefusal(f"{alias_of(move.workload)} was moved meanwhile: nothing was moved; run it again")
            for version, digest in move.proven.items():
                registry.set_tags(version, {proven_tag(move.workload): digest})
        started = []
        try:
            for move in moves:
                started.append(move)
                _write(registry, move.workload, move.before, move.after)
        except BaseException:
            for move in reversed(started):
                _write(registry, move.workload, read_aliases(registry, move.workload), move.before)
            raise
        for move in moves:
            found = read_aliases(registry, move.workload)
            if found != move.after:
                raise GateRefusal(
                    f"another host moved {alias_of(move.workload)} meanwhile: expected {move.after}, it is {found}"
                )
            _say(registry, move)


def _write(registry: Registry, workload: str, before: Aliases, after: Aliases) -> None:
    """Set what changed, the route itself last, and then remove what is gone."""
    for name, ending in ENDINGS.items():
        version = getattr(after, name)
        if version is not None and version != getattr(before, name):
            registry.set_alias(alias_of(workload) + ending, version)
    for name, ending in ENDINGS.items():
        if getattr(after, name) is None and getattr(before, name) is not None:
            registry.delete_alias(alias_of(workload) + ending)


def _say(registry: Registry, move: Move) -> None:
    """Tag the versions with who moved the route, when and why."""
    assert move.after.now is not None, "a move leads to a version"
    said = f"{now()} by {getuser()}: {move}"
    tags = {alias_of(move.workload): said}
    if not move.back and (registry.tags(move.after.now) or {}).get(rolled_back_tag(move.workload)):
        tags[rolled_back_tag(move.workload)] = ""
    registry.set_tags(move.after.now, tags)
    if move.back and move.before.now is not None:
        registry.set_tags(move.before.now, {rolled_back_tag(move.workload): said})
