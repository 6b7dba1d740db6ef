"""Registered engines for the tests of routes: an in-memory registry and minimal evidence on disk."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helpers.registry.candidates import MemoryRegistry, decide_pass, judged_candidate
from helpers.verdicts.reports import row
from pipeline.config.policies import shipped_policies
from pipeline.registry.findings import Finding
from pipeline.registry.promotion import Engines, RegisteredEngine
from pipeline.registry.routing.stages import route
from pipeline.registry.tracking import Version
from stages.core.digest import file_digest
from stages.verdict.candidate import Candidate
from stages.verdict.coverage import Limits
from stages.verdict.report import EvaluationReport, SampleRow, load_report
from stages.verdict.thresholds import Check, Gate, LineStatus, Status, Verdict

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
        return Engines(self.registry, self._find, self._decide)

    def routed(self, **routes: str) -> list[str]:
        """Set routes (class -> engine), and return the printed lines."""
        said: list[str] = []
        route(self.engines, routes, said.append)
        return said

    def route(self, workload: str) -> str | None:
        return self.registry.aliases.get(f"route-{workload}")

    def _find(self, version: Version) -> RegisteredEngine:
        candidate, live = self.candidates[version.number], self.live[version.number]
        report = load_report(candidate.report.path.parent)
        report = report.model_copy(update={"system": report.system.model_copy(update={"max_live_tokens": live})})
        rows = [row(workload, 0) for workload in CLASSES]
        evidence = candidate, report, rows, POLICIES[candidate.policy], Limits()
        return RegisteredEngine(*evidence, decide_pass, partial(self._replay, candidate))

    def _replay(self, candidate: Candidate) -> Sequence[Finding]:
        self.replays.append(candidate.name)
        same = file_digest(candidate.identity.path) == candidate.identity.digest
        return [Finding("identity", "same" if same else "differs", "its sha256")]

    def _decide(self, report: EvaluationReport, _rows: Sequence[SampleRow]) -> Verdict:
        line: dict[str, Any] = {"gate": Gate.ACCURACY, "value": 0.0, "bound": 0.0, "threshold": 0.0}
        status = {workload: self.lines.get((report.engine_digest, workload), "PASS") for workload in CLASSES}
        checks = [Check(**line, where=one, status=status[one], reason=f"{one}: a reason") for one in CLASSES]
        return Verdict(status="PASS", reasons=[], checks=checks, samples_needed={})
