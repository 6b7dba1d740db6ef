"""Registered engines for the tests of routes: an in-memory registry and minimal evidence on disk."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helpers.registry.candidates import MemoryRegistry, judged_candidate
from pipeline.config.policies import shipped_policies
from pipeline.registry.promotion import Engines, Finding, RegisteredEngine
from pipeline.registry.routing import route
from pipeline.registry.tracking import Version
from stages.core.digest import file_digest
from stages.verdict.candidate import Candidate
from stages.verdict.coverage import Limits
from stages.verdict.thresholds import Check, Gate, LineStatus, Status

POLICIES = {policy.name: policy for policy in shipped_policies()}
CLASSES = ("retrieval", "copy")


class Fleet:
    """A model's registered engines. A test sets the verdict of every engine and class."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = MemoryRegistry(folder)
        self.candidates: dict[str, Candidate] = {}
        self.live: dict[str, int] = {}
        self.lines: dict[tuple[str, str], LineStatus] = {}
        """(engine's digest, class) -> status of its line; PASS if absent."""
        self.replays: list[str] = []

    def add(self, policy: str, live_tokens: int = 1000, verdict: Status = "PASS", **lines: LineStatus) -> str:
        """Register an engine and return its version."""
        candidate = self.registry.add(judged_candidate(self.folder, policy, verdict, metrics={}))
        version = candidate.version
        self.candidates[version] = candidate
        self.live[version] = live_tokens
        self.lines |= {(candidate.engine.digest, workload): status for workload, status in lines.items()}
        return version

    @property
    def engines(self) -> Engines:
        """The engines as a command opens them: nothing has been replayed yet."""
        return Engines(self.registry, self._find)

    def routed(self, **routes: str) -> list[str]:
        """Set routes (class -> engine), and return the printed lines."""
        return list(route(self.engines, routes))

    def route(self, workload: str) -> str | None:
        return self.registry.aliases.get(f"route-{workload}")

    def _find(self, version: Version) -> RegisteredEngine:
        candidate = self.candidates[version.number]
        line: dict[str, Any] = {"gate": Gate.ACCURACY, "value": 0.0, "bound": 0.0, "threshold": 0.0}
        status = {workload: self.lines.get((candidate.engine.digest, workload), "PASS") for workload in CLASSES}
        checks = tuple(Check(**line, where=one, status=status[one], reason=f"{one}: a reason") for one in CLASSES)
        decided = {"verdict": "PASS", "checks": checks, "metrics": {"memory/max_live_tokens": float(self.live[version.number])}}
        policy, replay = POLICIES[candidate.policy], partial(self._replay, candidate)
        return RegisteredEngine(candidate.model_copy(update=decided), None, Limits(), policy, frozenset(CLASSES), replay)

    def _replay(self, candidate: Candidate) -> Sequence[Finding]:
        self.replays.append(candidate.name)
        same = file_digest(candidate.identity.path) == candidate.identity.digest
        return [Finding("identity", "same" if same else "differs", "its sha256")]
