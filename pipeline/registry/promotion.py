"""Promotion decides which engine serves: it chooses a candidate, verifies its evidence again and moves aliases.

The aliases are `candidate` (the version that was registered last), `champion` (the one that serves) and `previous` (the one
that the champion replaced). This module does not know MLflow; `pipeline.registry.mlflow_store` implements `Registry`.

A promotion first sets `previous` to the present champion and then moves `champion`. If it is interrupted in between, the old
champion still serves and promoting again repairs the aliases. A rollback makes `previous` the champion and removes
`previous`, so that a second rollback (two people, a CI retry) is an error instead of bringing the bad engine back.

MLflow has no compare-and-swap. The lock covers every process on this host that uses the same store (with SQLite) or the same
work directory (with a server). Against other hosts there is only a check after the write, which reports a lost race.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from pipeline.artifacts.digest import file_digest, files_digest, tree_files
from pipeline.artifacts.locks import locked
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.registry.summary import Candidate, evidence_digest
from pipeline.verdict.coverage import Limits
from pipeline.verdict.report import REPORT_FILE, EvaluationReport, SampleRow
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
"""Replays the evidence of a candidate; raises UserError when its identity cannot be read. See `pipeline.run.verify`."""

Decide = Callable[[EvaluationReport, Sequence[SampleRow]], Verdict]
"""The gates, bound to their thresholds."""


class Registry(Protocol):
    """Versions of one registered model, their tags, and the aliases that point at them."""

    lock: Path

    def alias(self, alias: str) -> str | None: ...
    def set_alias(self, alias: str, version: str) -> None: ...
    def delete_alias(self, alias: str) -> None: ...
    def tags(self, version: str) -> dict[str, str] | None:
        """Return the tags of a version; None when there is no such version."""
        ...

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None: ...


@dataclass(frozen=True)
class Move:
    """The aliases after a promotion or a rollback."""

    champion: str
    """Name of the candidate that serves now."""
    version: str
    """The registered version that serves now."""
    previous: str | None
    """Version that a rollback would bring back."""
    changed: bool
    """Whether any alias moved."""
    message: str


ORACLE = "torch"
"""The backend that defines the right logits for the others. It is written to be read, not to serve."""


def live_tokens(candidate: Candidate) -> float:
    """Return the objective: the live tokens that fit the memory budget (`workloads.load`). Servers admit requests by it."""
    tokens = candidate.metrics.get("memory/max_live_tokens")
    return -math.inf if tokens is None else tokens


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate that passed.

    The most live tokens win. Among equals another engine wins over the oracle, and then the lowest mean KL.

    Raises:
        GateRefusal: when none passed.
    """
    passed = [candidate for candidate in candidates if candidate.verdict == PASS]
    if not passed:
        verdicts = "; ".join(f"{c.name}: {c.verdict}" + (f" ({c.reasons[0]})" if c.reasons else "") for c in candidates)
        raise GateRefusal(f"no candidate passed: {verdicts}" if verdicts else "there is no candidate: run stage=evaluate first")
    return max(passed, key=lambda c: (live_tokens(c), c.backend != ORACLE, -c.metric("quality/kl_mean"), c.name))


@dataclass(frozen=True)
class Proof:
    """What a replay of a candidate's evidence gave."""

    version: str
    """The candidate's version in the registry."""
    covered: Limits | None
    """How far the verdict holds; None for a report that does not say."""
    verdict: Verdict


def verify(candidate: Candidate, replay: Replay, decide: Decide, registry: Registry) -> Proof:
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


def _check_citations(candidate: Candidate) -> None:
    """Compare the digests that the candidate cites with the files on disk. Raises GateRefusal."""
    for name, cited in (("engine", candidate.engine), ("baseline", candidate.baseline)):
        _require(cited.path.is_dir(), f"its {name} {cited.path} is gone; run stage=build again")
        _compare(f"the {name} in {cited.path}", files_digest(tree_files(cited.path)), cited.digest)
    report, identity = candidate.report, candidate.identity
    for path in (report.path, candidate.samples):
        _require(path.is_file(), f"its evidence {path} is gone; run stage=evaluate again")
    _compare(f"the report in {report.path.parent}", evidence_digest(report.path), report.digest)
    _require(identity.path.is_file(), f"its identity {identity.path} is gone; run stage=evaluate again")
    same = file_digest(identity.path) == identity.digest
    _require(same, f"{identity.path} is not the identity that the candidate cites")


def _compare(name: str, digest: str, cited: str) -> None:
    _require(digest == cited, f"{name} has digest {digest[:12]}, the candidate cites {cited[:12]}")


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


def _check_aliases(registry: Registry, champion: str, previous: str | None) -> None:
    """Read the aliases back, since another host may have moved them at the same time. Raises GateRefusal."""
    aliases = registry.alias("champion"), registry.alias("previous")
    if aliases != (champion, previous):
        raise GateRefusal(
            f"another host moved the aliases meanwhile: champion={aliases[0]} previous={aliases[1]}, "
            f"expected champion={champion} previous={previous}; look at the registry, then promote again"
        )


def promote(candidates: Sequence[Candidate], registry: Registry, replay: Replay, decide: Decide, *, sweep: str) -> Move:
    """Make the best candidate that passed the champion.

    Args:
        candidates: Those to choose from.
        registry: Where versions and aliases are.
        replay: Replays the best candidate's evidence.
        decide: The gates, which decide its verdict again.
        sweep: Identifier of the candidates' sweep, noted in the registry.

    Raises:
        GateRefusal: when none passed, or the best one's evidence does not hold.
        MissingRequirement: when a library that the replay takes is not installed.
    """
    best = choose(candidates)
    try:
        proof = verify(best, replay, decide, registry)
    except (GateRefusal, MissingRequirement) as error:
        raise type(error)(f"{best.name} is not promoted: {error}") from error
    version, covered = proof.version, proof.covered
    with locked(registry.lock, "promoting"):
        old, previous = registry.alias("champion"), registry.alias("previous")
        if old == version:
            return Move(best.name, version, previous, False, f"{best.name} (version {version}) is the champion already")
        note = ""
        rolled_back = (registry.tags(version) or {}).get("rolled_back_at")
        if rolled_back:
            note = f"; it had been rolled back at {rolled_back}"
        tags = {
            "promoted_at": now(),
            "promoted_by_sweep": sweep,
            "promoted_over": old or "",
            "evidence": f"engine {best.engine.digest} baseline {best.baseline.digest} report {best.report.digest}",
        }
        if covered is not None:
            tags |= {"max_tokens": str(covered.tokens), "max_batch": str(covered.batch)}
        registry.set_tags(version, tags)
        if old is not None:
            registry.set_alias("previous", old)
        registry.set_alias("champion", version)
        _check_aliases(registry, version, old if old is not None else previous)
    over = f" over version {old}" if old is not None else ""
    held = f", {covered}" if covered is not None else ""
    return Move(best.name, version, old, True, f"{best.name} (version {version}) is the champion{over}{note}{held}")


def rollback(registry: Registry) -> Move:
    """Bring the previous champion back.

    Raises:
        UserError: when there is none, or its version was deleted.
    """
    with locked(registry.lock, "rolling back"):
        bad, previous = registry.alias("champion"), registry.alias("previous")
        if bad is None or previous is None or previous == bad:
            raise UserError("stage=rollback: there is no previous champion to return to")
        tags = registry.tags(previous)
        if tags is None:
            raise UserError(f"stage=rollback: version {previous}, the previous champion, was deleted from the registry")
        registry.set_alias("champion", previous)
        registry.delete_alias("previous")
        registry.set_tags(bad, {"rolled_back_at": now()})
        _check_aliases(registry, previous, None)
    name = tags.get("kv", f"version {previous}")
    return Move(name, previous, None, True, f"{name} (version {previous}) is the champion again, version {bad} is not")


def now() -> str:
    """Return the time for a tag."""
    return datetime.now(UTC).isoformat(timespec="seconds")
