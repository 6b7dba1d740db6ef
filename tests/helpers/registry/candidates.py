"""Candidates with minimal evidence on disk, and an in-memory registry of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.policies.shipped import SHIPPED
from helpers.verdicts.reports import report as make_report
from helpers.verdicts.reports import row
from pipeline.config.config import Tracking
from pipeline.evidence.reading import Finding, first_refusal
from pipeline.registry.promotion import Engines, RegisteredEngine
from pipeline.registry.routing import route
from pipeline.registry.tracking import LEFT, RegisteredModel, Version, locate
from stages.core.digest import file_digest, files_digest, tree_files
from stages.core.errors import GateRefusal
from stages.policies.policy import FP16_POLICY
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.coverage import Limits
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.verdict import Check, Gate, LineStatus, Status, Verdict

CLASSES = ("retrieval", "copy")


def judged_candidate(
    folder: Path, policy: str, verdict: Status = "PASS", *, metrics: Mapping[str, float], report: str | None = None
) -> Candidate:
    """Create an unregistered candidate. `report` replaces the default report on its engine and baseline."""
    engine, baseline, evidence = folder / "engines" / policy, folder / "engines" / "fp16", folder / "reports" / policy
    for path in (engine, baseline, evidence):
        path.mkdir(parents=True, exist_ok=True)
    (engine / "bundle.json").write_text(json.dumps({"kv": policy}))
    (engine / "kv_policy.json").write_text(json.dumps({"name": policy}))
    (engine / "weights.bin").write_bytes(b"weights")
    (baseline / "bundle.json").write_text("{}")
    engine_digest, baseline_digest = (files_digest(tree_files(path)) for path in (engine, baseline))
    rows = [row(name, 0) for name in CLASSES]
    if report is None:
        report = make_report(rows, engine_digest=engine_digest, baseline_digest=baseline_digest).model_dump_json()
    (evidence / REPORT_FILE).write_text(report)
    (evidence / SAMPLES_FILE).write_text("".join(record.model_dump_json() + "\n" for record in rows))
    (evidence / "identity.json").write_text(json.dumps({"policy": policy}))
    return Candidate(
        name=policy,
        policy=policy,
        model="tiny",
        backend="onnxruntime",
        verdict=verdict,
        reasons=() if verdict == "PASS" else ("mean KL",),
        metrics=metrics,
        engine=Cited(path=engine, digest=engine_digest),
        baseline=Cited(path=baseline, digest=baseline_digest),
        report=Cited(path=evidence / REPORT_FILE, digest=evidence_digest(evidence / REPORT_FILE)),
        identity=Cited(path=evidence / "identity.json", digest=file_digest(evidence / "identity.json")),
    )


def evidence_digest(report: Path) -> str:
    """Return the digest of a report and its samples, as a candidate cites it."""
    return files_digest({REPORT_FILE: file_digest(report), SAMPLES_FILE: file_digest(report.with_name(SAMPLES_FILE))})


def compare_identity(candidate: Candidate) -> Sequence[Finding]:
    """Replay the evidence of a candidate: compare only its identity's digest."""
    unchanged = file_digest(candidate.identity.path) == candidate.identity.digest
    return [Finding("identity", "same" if unchanged else "differs", "its sha256")]


def engines_of(
    registry: Any,
    candidates: Iterable[Candidate],
    replay: Callable[[Candidate], Sequence[Finding]] = compare_identity,
    decide: Callable[[EvaluationReport, Sequence[SampleRow]], Verdict] | None = None,
    built_for: Limits | None = None,
    attempt: int = 1,
) -> Engines:
    """Return the registered engines of candidates, all built for the same limits. Verdicts stay if `decide` is None."""
    by_version = {candidate.version: candidate for candidate in candidates}

    def read(version: Version) -> RegisteredEngine:
        if version.number not in by_version:
            raise GateRefusal(f"{version} has no evidence")
        candidate = by_version[version.number]
        folder = candidate.report.path.parent
        report, rows = load_report(folder), load_rows(folder)
        decided = (
            {"covered": report.limits and str(report.limits)} if decide is None else Candidate.decided(decide(report, rows))
        )
        candidate = candidate.model_copy(update=decided)
        return RegisteredEngine(
            candidate=candidate,
            beyond=report.limits.exceeded_by(built_for or Limits()) if report.limits is not None else None,
            policy=SHIPPED.get(candidate.policy, FP16_POLICY),
            workloads=frozenset(row.workload for row in rows),
            questions=report.workloads_digest,
            replay=lambda: first_refusal(replay(candidate)),
        )

    return Engines(registry, read, attempt=attempt)


class MemoryRegistry:
    """An in-memory registry that records replays and the order of alias moves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, folder / "lock"
        self.location = locate(Tracking(), folder, "tiny", {})
        self.aliases: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.routes_left: dict[str, set[str]] = {}
        self.moves: list[tuple[str, str | None]] = []
        self.candidates: dict[str, Candidate] = {}
        self.replays: list[str] = []

    def add(self, candidate: Candidate) -> Candidate:
        """Register a candidate as the next version; return it with the version."""
        version = str(len(self.versions) + 1)
        tags = {"kv": candidate.name, "verdict": candidate.verdict, "identity_digest": candidate.identity.digest}
        self.versions[version] = tags
        self.candidates[version] = candidate.model_copy(update={"run_id": "run", "version": version})
        return self.candidates[version]

    def judge(self, policy: str, live_tokens: float = 1000, verdict: Status = "PASS", **lines: LineStatus) -> Candidate:
        """Register a new engine. `lines`: class of work -> status of its line in the report, PASS by default."""
        defaults: dict[str, Any] = {"gate": Gate.ACCURACY, "value": 0.0, "bound": 0.0, "threshold": 0.0}
        checks = tuple(
            Check(**defaults, where=name, status=lines.get(name, "PASS"), reason=f"{name}: a reason") for name in CLASSES
        )
        metrics = {"quality/kl_mean": 0.1, "memory/max_live_tokens": float(live_tokens)}
        judged = judged_candidate(self.folder, policy, verdict, metrics=metrics)
        return self.add(judged.model_copy(update={"checks": checks}))

    def change(self, version: str, **changes: Any) -> Candidate:
        """Replace fields of a version's candidate; return the changed candidate."""
        self.candidates[version] = self.candidates[version].model_copy(update=changes)
        return self.candidates[version]

    def engines(self, replay: Callable[[Candidate], Sequence[Finding]] = compare_identity, **options: Any) -> Engines:
        """Return the engines as a command opens them. `options` are arguments of `engines_of`."""

        def counted(candidate: Candidate) -> Sequence[Finding]:
            self.replays.append(candidate.name)
            return replay(candidate)

        return engines_of(self, self.candidates.values(), counted, **options)

    def routed(self, **routes: str) -> list[str]:
        """Set routes (class -> engine), and return the printed lines."""
        return list(route(self.engines(), routes))

    def read(self) -> RegisteredModel:
        versions = {number: Version(number, dict(tags), "run") for number, tags in self.versions.items()}
        left_routes = {f"{LEFT}{workload}": ",".join(numbers) for workload, numbers in self.routes_left.items()}
        aliases = {alias: number for alias, number in self.aliases.items() if number in versions}
        return RegisteredModel("kvgate-tiny", versions, aliases, left_routes)

    def set_alias(self, alias: str, version: str | None) -> None:
        self.moves.append((alias, version))
        if version is None:
            del self.aliases[alias]
        else:
            assert version in self.versions, "MLflow refuses other aliases"
            self.aliases[alias] = version

    def set_tags(self, version: str, tags: Mapping[str, str | None]) -> None:
        every = {**self.versions[version], **tags}
        self.versions[version] = {name: text for name, text in every.items() if text is not None}
        assert len(self.versions[version]) <= 6

    def judged_by(self, version: Version) -> SimpleNamespace:
        judged = self.candidates[version.number]
        return SimpleNamespace(tags={"checkpoint_digest": judged.checkpoint, **judged.citations}, metrics=judged.metrics)

    def set_left(self, workload: str, versions: set[str]) -> None:
        self.routes_left[workload] = set(versions)
