"""Candidates with minimal evidence on disk, enough to register and promote them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gate_reports import report as make_report
from gate_reports import row

from pipeline.registry.promotion import ReplayedEvidence
from pipeline.registry.summary import evidence_digest
from pipeline.registry.tracking import Version
from stages.core.digest import file_digest, files_digest, tree_files
from stages.verdict.candidate import Candidate, Cited, Registration
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


def replay_without_findings(candidate: Candidate) -> ReplayedEvidence:
    """Return a replay that found no differences."""
    directory = candidate.report.path.parent
    digests = {
        "engine_digest": files_digest(tree_files(candidate.engine.path)),
        "baseline_digest": files_digest(tree_files(candidate.baseline.path)),
        "report_digest": evidence_digest(candidate.report.path),
        "identity_digest": file_digest(candidate.identity.path),
    }
    return ReplayedEvidence((), load_report(directory), load_rows(directory), digests)


def decide_pass(_report: EvaluationReport, _rows: Sequence[SampleRow]) -> Verdict:
    """Return a PASS for any report."""
    return Verdict(status="PASS", reasons=[], checks=[], samples_needed={})


def proven(_version: Version) -> None:
    """Stand-in for a replay of a version's evidence: finds no difference."""


class MemoryRegistry:
    """An in-memory registry that records the order of alias moves."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "lock"
        self.aliases: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.moves: list[tuple[str, str]] = []

    def add(self, candidate: Candidate) -> Candidate:
        """Register a candidate as the next version; return it with its registration."""
        version = str(len(self.versions) + 1)
        self.versions[version] = {**candidate.citations, "kv": candidate.name}
        return candidate.model_copy(update={"registration": Registration(run_id="run", model_version=version)})

    def alias(self, alias: str) -> str | None:
        return self.aliases.get(alias)

    def set_alias(self, alias: str, version: str) -> None:
        self.moves.append((alias, version))
        self.aliases[alias] = version

    def delete_alias(self, alias: str) -> None:
        del self.aliases[alias]

    def registered(self) -> list[Version]:
        return [Version(number, tags, "run") for number, tags in self.versions.items()]

    def tags(self, version: str) -> dict[str, str] | None:
        return self.versions.get(version)

    def set_tags(self, version: str, tags: Mapping[str, str | None]) -> None:
        every = {**self.versions[version], **tags}
        self.versions[version] = {name: text for name, text in every.items() if text is not None}
