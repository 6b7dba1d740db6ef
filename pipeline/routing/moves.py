"""Moves of routes: aliases of the registered model, three for each class.

`route-CLASS` is the engine that serves the class, `route-CLASS-previous` the one before, `route-CLASS-fallback` the one that a
broken route goes to where there is none before. Servers read the first.

Moves of one command in one direction are one record of the log of moves (`pipeline.trust.movelog`), from the aliases on which
they were decided: where those moved meanwhile, nothing is moved. The record decides for all its classes at once. A command
that is killed, or fails, before every alias has followed leaves the rest to the next one that reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.core.errors import GateRefusal
from pipeline.routing.engines import Engines
from pipeline.trust.movelog import MoveLog, Registry


@dataclass(frozen=True)
class Aliases:
    now: str | None
    previous: str | None = None
    fallback: str | None = None

    def moved_to(self, version: str) -> "Aliases":
        """Return them after a move to a version: what served before is the previous one."""
        before = self.now if self.now not in (None, version) else self.previous
        return replace(self, now=version, previous=before if before != version else None)

    def named(self, workload: str) -> dict[str, str | None]:
        alias = alias_of(workload)
        return {alias: self.now, f"{alias}-previous": self.previous, f"{alias}-fallback": self.fallback}


@dataclass(frozen=True)
class Move:
    """One class, from the aliases on which it was decided to others."""

    workload: str
    before: Aliases
    after: Aliases
    why: str
    reports: Mapping[str, str] = field(default_factory=dict)
    """Version -> digest of its report: of those that were proven for this class, or of the one that is left."""
    back: bool = False
    """Whether it leaves a broken engine, which no monitor chooses for the class again."""

    def __str__(self) -> str:
        return f"version {self.before.now or 'none'} -> {self.after.now}: {self.why}"


def alias_of(workload: str) -> str:
    return f"route-{workload}"


def read_aliases(registry: Registry, workload: str) -> Aliases:
    return Aliases(*map(registry.alias, Aliases(None).named(workload)))


def way_back(engines: Engines, workload: str, before: Aliases, why: str) -> Move:
    """Return the move to the previous engine of a class, or to its fallback where no previous one can serve.

    It takes no replay: these were proven for the class when they were routed, and a broken engine must not wait for one. Where
    the log that says so cannot be trusted, they are replayed.
    """
    problems, log = [], engines.log
    history = log.read()
    proven = history.chosen(alias_of(workload), f"{alias_of(workload)}-fallback")
    for name, version in (("previous", before.previous), ("fallback", before.fallback)):
        if version is None or version == before.now:
            problems.append(f"no {name}")
        elif log.registry.tags(version) is None:
            problems.append(f"its {name}, version {version}, was deleted")
        elif history.problem is None and version not in proven:
            problems.append(f"its {name}, version {version}, was never proven for {workload}")
        else:
            if history.problem is not None:
                engines.proven(engines.named(version, name), workload, name)
            bad = before.now or ""
            reports = {bad: (log.registry.tags(bad) or {}).get("report_digest", "")}
            after = replace(before, now=version, previous=None)
            return Move(workload, before, after, f"{why}; to its {name}", reports, back=True)
    raise GateRefusal(f"{alias_of(workload)} cannot go back: {', '.join(problems)}")


def make_moves(log: MoveLog, title: str, moves: Sequence[Move]) -> None:
    """Make all moves back, then all others. Raises GateRefusal when an alias was moved by somebody else."""
    for back in (True, False):
        group = [move for move in moves if move.back is back]
        if not group:
            continue
        with log.changing(urgent=back) as history:
            for move in group:
                if read_aliases(log.registry, move.workload) != move.before:
                    raise GateRefusal(f"{alias_of(move.workload)} was moved meanwhile: it was left as it is; run it again")
            before = {alias: version for move in group for alias, version in move.before.named(move.workload).items()}
            after = {alias: version for move in group for alias, version in move.after.named(move.workload).items()}
            changed = [alias for alias in after if after[alias] != before[alias]]
            log.append(
                history,
                "rollback" if back else "route",
                f"{title}: " + "; ".join(f"{move.workload} {move}" for move in group),
                aliases={alias: after[alias] for alias in changed},
                before={alias: before[alias] for alias in changed},
                reports={version: digest for move in group for version, digest in move.reports.items()},
            )
