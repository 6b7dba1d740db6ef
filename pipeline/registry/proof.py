"""What a promotion asks of a candidate: its evidence is replayed, its gates decide again, and the registry cites the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.registry.summary import Candidate
from pipeline.verdict.coverage import Limits
from pipeline.verdict.gates import Decide
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Verdict

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

    Raises GateRefusal when something differs; MissingRequirement when nothing differs, but something is missing.
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
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of what was replayed, by the names under which a model version cites it."""
    built_for: Limits = field(default_factory=Limits)
    """What the engine's bundle allows."""


Replay = Callable[[Candidate], ReplayedEvidence]
"""Replays the evidence of a candidate; raises UserError when its identity cannot be read. See `pipeline.evidence.verify`."""


@dataclass(frozen=True)
class Proof:
    covered: Limits | None
    """How far the verdict holds; None for a report that does not say."""
    verdict: Verdict


def verify(candidate: Candidate, replay: Replay, decide: Decide) -> Proof:
    """Check the evidence of a registered candidate again: as it lies on disk now, and as its version cites it.

    Raises GateRefusal with the first thing that is wrong; MissingRequirement when nothing is wrong, but a library that the
    replay takes is not installed.
    """
    try:
        evidence = replay(candidate)
    except UserError as error:
        raise GateRefusal(str(error)) from error
    problems = [finding for finding in evidence.findings if finding.status != "same"]
    for finding in sorted(problems, key=lambda finding: finding.library_missing):  # a library says nothing of the evidence
        raise (MissingRequirement if finding.library_missing else GateRefusal)(str(finding))
    report = evidence.report
    assert report is not None, "a finding says that the report cannot be read"
    for name, digest in evidence.digests.items():
        what = f"its {name.removesuffix('_digest')} is not the one that version {candidate.version} cites"
        _require(candidate.citations[name] == digest, what)
    verdict = decide(report, evidence.rows)
    reasons = "; ".join(verdict.reasons)
    _require(verdict.status == PASS, f"decided again from its samples it is {verdict.status}: {reasons}")
    covered = report.limits
    beyond = covered.exceeded_by(evidence.built_for) if covered is not None else None
    _require(beyond is None, str(beyond))
    return Proof(covered, verdict)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise GateRefusal(reason)
