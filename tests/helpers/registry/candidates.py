"""Candidates with minimal evidence on disk, enough to register and promote them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from helpers.verdicts.reports import report as make_report
from helpers.verdicts.reports import row
from pipeline.registry.promotion import Engines, Finding, RegisteredEngine, Registry
from pipeline.registry.tracking import LEFT, RegisteredModel, Version
from stages.core.digest import file_digest, files_digest, tree_files
from stages.core.errors import GateRefusal
from stages.policies.policy import FP16_POLICY
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.coverage import Limits
from stages.verdict.gates import Decide
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.thresholds import Status, Verdict


def judged_candidate(
    folder: Path,
    policy: str,
    verdict: Status = "PASS",
    *,
    metrics: Mapping[str, float],
    report: str | None = None,
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
    rows = [row("copy", 0)]
    if report is None:
        report = make_report(rows, engine_digest=engine_digest, baseline_digest=baseline_digest).model_dump_json()
    (evidence / REPORT_FILE).write_text(report)
    (evidence / SAMPLES_FILE).write_text("".join(one.model_dump_json() + "\n" for one in rows))
    (evidence / "identity.json").write_text(json.dumps({"policy": policy}))
    return candidate_in(folder, policy, verdict, metrics)


def candidate_in(folder: Path, policy: str, verdict: Status, metrics: Mapping[str, float]) -> Candidate:
    """Return the candidate whose evidence is in a folder."""
    engine, baseline, evidence = folder / "engines" / policy, folder / "engines" / "fp16", folder / "reports" / policy
    return Candidate(
        name=policy,
        policy=policy,
        model="tiny",
        backend="onnxruntime",
        verdict=verdict,
        reasons=() if verdict == "PASS" else ("mean KL",),
        metrics=metrics,
        engine=Cited(path=engine, digest=files_digest(tree_files(engine))),
        baseline=Cited(path=baseline, digest=files_digest(tree_files(baseline))),
        report=Cited(path=evidence / REPORT_FILE, digest=evidence_digest(evidence / REPORT_FILE)),
        identity=Cited(path=evidence / "identity.json", digest=file_digest(evidence / "identity.json")),
    )


def evidence_digest(report: Path) -> str:
    """Return the digest of a report and its samples, as a candidate cites it."""
    return files_digest({REPORT_FILE: file_digest(report), SAMPLES_FILE: file_digest(report.with_name(SAMPLES_FILE))})


def replay_without_findings(_candidate: Candidate) -> Sequence[Finding]:
    """Return the findings of a replay that found no differences."""
    return ()


def decide_pass(report: EvaluationReport, _rows: Sequence[SampleRow]) -> Verdict:
    """Return a PASS for any report."""
    covered = None if report.limits is None else str(report.limits)
    return Verdict(status="PASS", reasons=[], checks=[], samples_needed={}, covered=covered)


def engines_of(
    registry: Registry,
    candidates: Iterable[Candidate],
    replay: Callable[[Candidate], Sequence[Finding]] = replay_without_findings,
    decide: Decide | None = None,
    **changes: Any,
) -> Engines:
    """Return the registered engines of candidates. By default their replay finds no difference and their verdicts stay.

    `changes` are fields of every engine.
    """
    known = {candidate.version: candidate for candidate in candidates}

    def read(version: Version) -> RegisteredEngine:
        if version.number not in known:
            raise GateRefusal(f"{version} has no evidence")
        candidate = known[version.number]
        folder = candidate.report.path.parent
        report, rows = load_report(folder), load_rows(folder)
        decided = (
            {"covered": report.limits and str(report.limits)} if decide is None else Candidate.decided(decide(report, rows))
        )
        candidate = candidate.model_copy(update=decided)
        workloads = frozenset(one.workload for one in rows)
        engine = RegisteredEngine(candidate, report.limits, Limits(), FP16_POLICY, workloads, partial(replay, candidate))
        return replace(engine, **changes)

    return Engines(registry, read)


class MemoryRegistry:
    """An in-memory registry that records the order of alias moves."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "lock"
        self.aliases: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.routes_left: dict[str, set[str]] = {}
        self.moves: list[tuple[str, str]] = []
        self.candidates: list[Candidate] = []

    def add(self, candidate: Candidate) -> Candidate:
        """Register a candidate as the next version; return it with the version."""
        version = str(len(self.versions) + 1)
        tags = {"kv": candidate.name, "verdict": candidate.verdict, "identity_digest": candidate.identity.digest}
        self.versions[version] = tags
        self.candidates.append(candidate.model_copy(update={"run_id": "run", "version": version}))
        return self.candidates[-1]

    def read(self) -> RegisteredModel:
        versions = {number: Version(number, dict(tags), "run") for number, tags in self.versions.items()}
        left = {f"{LEFT}{workload}": ",".join(numbers) for workload, numbers in self.routes_left.items()}
        return RegisteredModel("kvgate-tiny", versions, dict(self.aliases), left)

    def set_alias(self, alias: str, version: str | None) -> None:
        if version is None:
            del self.aliases[alias]
        else:
            self.moves.append((alias, version))
            self.aliases[alias] = version

    def set_tags(self, version: str, tags: Mapping[str, str | None]) -> None:
        every = {**self.versions[version], **tags}
        self.versions[version] = {name: text for name, text in every.items() if text is not None}
        assert len(self.versions[version]) <= 6

    def set_left(self, workload: str, versions: set[str]) -> None:
        self.routes_left[workload] = versions
