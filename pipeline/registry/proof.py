"""What a promotion asks of a candidate: its evidence is replayed, its gates decide again, and the registry cites the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.artifacts.digest import file_digest, files_digest, tree_files
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.registry.summary import Candidate, evidence_digest
from pipeline.trust.movelog import Registry
from pipeline.verdict.coverage import Limits
from pipeline.verdict.report import REPORT_FILE, EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Verdict

if TYPE_CHECKING:  # statistics take a while to load
    from pipeline.verdict.gates import Decide

PASS = "PASS"


@dataclass(frozen=True)
class Finding:
    """One line of a replay of the evidence: what was checked, and how it compares with the record."""

    name: str
    status: Literal["same", "differs", "missing"]
    detail: str
    library_missing: bool = False
    """Whether this machine lacks a library that the check takes; such a finding says nothing about the evidence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}, {self.detail}"


def require_same(what: str, findings: Sequence[Finding]) -> None:
    """Check that a replay of an engine found everything the same.

    Raises:
        GateRefusal: when something differs.
        MissingRequirement: when nothing differs, but something is missing.
    """
    named = {status: [finding.name for finding in findings if finding.status == status] for status in ("differs", "missing")}
    if named["differs"]:
        raise GateRefusal(f"{what} is not what was judged: {', '.join(named['differs'])}")
    if named["missing"]:
        raise MissingRequirement(f"{what} could not be verified, missing: {', '.join(named['missing'])}")


@dataclass(frozen=True)
class ReplayedEvidence:
    """The findings of a replay of a candidate's evidence, and the report and samples that the gates decide on."""

    findings: Sequence[Finding]
    report: EvaluationReport | None
    """None where it cannot be read, which a finding says."""
    rows: Sequence[SampleRow]
    built_for: Limits = field(default_factory=Limits)
    """What the engine's bundle allows."""


Replay = Callable[[Candidate], ReplayedEvidence]
"""Replays the evidence of a candidate; raises UserError when its identity cannot be read. See `pipeline.evidence.verify`."""


@dataclass(frozen=True)
class Proof:
    """What a replay of a candidate's evidence gave."""

    version: str
    """The candidate's version in the registry."""
    covered: Limits | None
    """How far the verdict holds; None for a report that does not say."""
    verdict: Verdict


def verify(candidate: Candidate, replay: Replay, decide: "Decide", registry: Registry) -> Proof:
    """Check the evidence of a candidate again: as it lies on disk now, and as the registry cites it.

    Raises:
        GateRefusal: with the first thing that is wrong.
        MissingRequirement: when nothing is wrong, but a library that the replay takes is not installed.
    """
    _check_citations(candidate)
    try:
        evidence = replay(candidate)
    except UserError as error:
        raise GateRefusal(str(error)) from error
    problems = [finding for finding in evidence.findings if finding.status != "same"]
    for finding in problems:
        _require(finding.library_missing, str(finding))
    if problems:
        raise MissingRequirement(str(problems[0]))
    report = evidence.report
    assert report is not None, "a finding says that the report cannot be read"
    _require(report.engine_digest == candidate.engine.digest, "its report is about another engine")
    _require(report.baseline_digest == candidate.baseline.digest, "its report compares with another baseline")
    replayed = evidence_digest(candidate.identity.path.with_name(REPORT_FILE))
    _require(replayed == candidate.report.digest, f"{candidate.identity.path} is about another report")
    verdict = decide(report, evidence.rows)
    reasons = "; ".join(verdict.reasons)
    _require(verdict.status == PASS, f"decided again from its samples it is {verdict.status}: {reasons}")
    covered = report.limits
    beyond = covered.exceeded_by(evidence.built_for) if covered is not None else None
    _require(beyond is None, str(beyond))
    return Proof(_registered_version(candidate, registry), covered, verdict)


def _require(holds: bool, reason: str) -> None:
    """Raise GateRefusal with the reason unless the condition holds."""
    if not holds:
        raise GateRefusal(reason)


def _directory_digest(path: Path) -> str:
    return files_digest(tree_files(path))


def _check_citations(candidate: Candidate) -> None:
    """Compare what the candidate cites with the files on disk. Raises GateRefusal."""
    for name, cited, digest_of in (
        ("engine", candidate.engine, _directory_digest),
        ("baseline", candidate.baseline, _directory_digest),
        ("report", candidate.report, evidence_digest),
        ("identity", candidate.identity, file_digest),
    ):
        try:
            digest = digest_of(cited.path) if cited.path.exists() else None
        except FileNotFoundError:  # the samples beside the report
            digest = None
        _require(digest is not None, f"its {name} {cited.path} is gone; judge it again with stage=evaluate")
        _require(digest == cited.digest, f"its {name} {cited.path} is not the one that it cites")


def _registered_version(candidate: Candidate, registry: Registry) -> str:
    """Return the candidate's version, whose tags cite the same evidence. Raises GateRefusal when they do not."""
    if candidate.registration is None:
        raise GateRefusal("it is not registered (tracking.enabled=false?)")
    version = candidate.registration.model_version
    tags = registry.tags(version)
    if tags is None:
        raise GateRefusal(f"version {version} is not in the registry")
    for name, digest in candidate.citations.items():
        _require(tags.get(name) == digest, f"version {version} cites another {name}")
    return version
