"""Registered engines that may serve a class: found by name, and proven by a replay as in a promotion."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from pipeline.registry.promotion import Proof, Registry, Replay, verify
from pipeline.registry.routing.files import DEFAULT
from pipeline.registry.tracking import Version
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.policies.policy import KVPolicy
from stages.verdict.candidate import Candidate
from stages.verdict.gates import Decide
from stages.workloads.config import Workload


@dataclass(frozen=True)
class RoutableEngine:
    """A registered engine with its evidence on this machine."""

    candidate: Candidate
    policy: KVPolicy
    live_tokens: int
    """Tokens that the memory of `load` holds at once, from the report. Promotions rank engines by this number too."""
    load: tuple[float, int]
    """Cache memory in GiB, and tokens per sequence."""
    workloads: frozenset[str]

    @property
    def version(self) -> str:
        return self.candidate.version

    @property
    def report(self) -> str:
        return self.candidate.report.digest

    def __str__(self) -> str:
        return f"version {self.version} ({self.candidate.name})"


@dataclass(frozen=True)
class Engines:
    """The registered engines of a model, and the checks that a promotion makes."""

    registry: Registry
    find: Callable[[Version], RoutableEngine]
    """Returns the engine of a version. Raises GateRefusal if its evidence is missing."""
    replay: Replay
    decide: Decide
    proofs: dict[str, Proof] = field(default_factory=dict)
    """Version -> result of its replay. A replay takes seconds, and an engine may serve several classes."""

    def named(self, name: str, key: str) -> RoutableEngine:
        """Return the latest version with this name, or the version with this number.

        `key` locates the name in the routing file, for messages.
        """
        versions = self.registry.registered()
        named = [one for one in versions if name in (one.number, one.name)]
        if not named:
            known = ", ".join(sorted({one.tags.get("kv", "") for one in versions} - {""})) or "none"
            raise UserError(f"{key}={name}: no registered engine is called so; there are {known}")
        try:
            return self.find(max(named, key=lambda one: int(one.number)))
        except GateRefusal as error:
            raise GateRefusal(f"{key}={name}: {error}") from error

    def prove(self, engine: RoutableEngine, workload: str) -> None:
        """Check the engine's evidence again, and check that it covers the class."""
        if engine.version not in self.proofs:
            self.proofs[engine.version] = verify(engine.candidate, self.replay, self.decide)
        if workload == DEFAULT:  # the verdict covers all workloads
            return
        checks = self.proofs[engine.version].verdict.checks
        lines = [check for check in checks if check.where == workload or check.where.startswith(f"{workload} [")]
        if not lines or workload not in engine.workloads:
            raise GateRefusal(f"its report has not judged {workload}; it judged {', '.join(sorted(engine.workloads))}")
        for line in lines:
            if line.status not in ("PASS", "WARNING"):
                raise GateRefusal(f"{workload} is {line.status}: {line.reason}")

    def proven(self, engine: RoutableEngine, workload: str, key: str) -> RoutableEngine:
        """Return the engine after `prove`, whose errors are raised in one line that names the key."""
        try:
            self.prove(engine, workload)
        except (GateRefusal, MissingRequirement) as error:
            raise type(error)(f"{key}={engine.candidate.name}: version {engine.version} is not proven: {error}") from error
        return engine


def check_classes(named: Mapping[str, Iterable[RoutableEngine]]) -> None:
    """Refuse a class that kvgate does not know and no engine of the routing file was judged on. Raises UserError."""
    judged = {workload for engines in named.values() for engine in engines for workload in engine.workloads}
    for workload in named:
        if workload not in {DEFAULT, *get_args(Workload), *judged}:
            choices = ", ".join(sorted(judged or get_args(Workload)))
            raise UserError(f"routing.file: routes.{workload}: no such class; these engines were judged on {choices}")
