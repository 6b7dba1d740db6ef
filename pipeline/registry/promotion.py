"""Promotion decides which engine serves: it chooses a candidate, verifies its evidence again and moves aliases.

The aliases are `candidate` (the version that was registered last, unless it failed), `champion` (the one that serves) and
`previous` (the one that the champion replaced). A promotion asks of a candidate that its evidence is replayed, its gates decide
again, and the registry cites the same (`verify`). This module does not know MLflow; `pipeline.registry.mlflow_store`
implements `Registry`.

A move is decided by one record of the log (`pipeline.trust.movelog`), which the aliases follow. A rollback makes `previous`
the champion and removes `previous`, so that a second rollback (two people, a CI retry) is an error instead of bringing the bad
engine back. What was rolled back stays back until it is judged anew, by another report, or asked for by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pipeline.core.backends import serves_last
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Version
from pipeline.trust.movelog import MoveLog
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
    """How far the verdict holds; None if no sample's steps were recorded."""
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


@dataclass(frozen=True)
class Move:
    """Which engine serves after a promotion or a rollback."""

    champion: str
    message: str


def live_tokens(candidate: Candidate) -> float:
    """Return the objective: the live tokens that fit the memory budget (`workloads.load`). Servers admit requests by it."""
    return candidate.metrics.get("memory/max_live_tokens", -math.inf)


Find = Callable[[Version], tuple[Candidate, Any]]
"""Finds a version: the candidate as its artifacts say it is, and its evidence. Raises GateRefusal."""


def judged_again(
    listed: Sequence[Candidate], registered: Sequence[Version], find: Find, decide: Decide, model: str, name: str | None = None
) -> list[Candidate]:
    """Return the candidates that a summary lists, as their artifacts say they are, decided again.

    Of the summary this takes which versions they are and nothing else.
    """
    versions = {one.number: one for one in registered}
    found: dict[str, Candidate] = {}
    for named in listed:
        if named.registration is None:
            raise GateRefusal(f"{named.name} is not promoted: it is not registered (tracking.enabled=false?)")
        version = named.registration.model_version
        if version not in versions:
            raise GateRefusal(f"{named.name} is not promoted: version {version} is not in the registry")
        if version in found or name not in (None, versions[version].name):
            continue
        candidate, evidence = find(versions[version])
        if candidate.model != model:
            raise GateRefusal(f"{candidate.name} is not promoted: version {version} is of model {candidate.model}, not {model}")
        verdict = decide(evidence.report, evidence.rows)
        found[version] = candidate.model_copy(update=Candidate.decided(verdict))
    return list(found.values())


def incumbent(
    version: str | None, registered: Sequence[Version], find: Find, decide: Decide, candidates: Sequence[Candidate]
) -> Candidate | None:
    """Return the champion as a candidate beside others, where it is a rival of theirs.

    It is one where it is of the same checkpoint as one of them, under another name, and still passes: a baseline that was built
    again has another digest. Servers are told apart by their baselines. One that is judged anew goes by its new evidence.
    """
    serving = next((one for one in registered if one.number == version), None)
    if serving is None or serving.name in [one.name for one in candidates]:
        return None
    try:
        found, evidence = find(serving)
    except GateRefusal:  # another work directory judged it
        return None
    verdict = decide(evidence.report, evidence.rows)
    rival = any(_origin(one) == _origin(found) for one in candidates) and verdict.status == PASS
    return found.model_copy(update=Candidate.decided(verdict)) if rival else None


def _origin(candidate: Candidate) -> str:
    return candidate.checkpoint or candidate.baseline.digest


def choose(candidates: Sequence[Candidate], left: Mapping[str, str] = MappingProxyType({})) -> Candidate:
    """Return the best candidate that passed.

    The most live tokens win. Among equals another engine wins over the oracle, and then the lowest mean KL. An engine that a
    rollback `left`, by the digest of its report, is none.
    """
    best = max(
        (candidate for candidate in candidates if candidate.verdict == PASS and candidate.report.digest not in left),
        key=lambda c: (live_tokens(c), not serves_last(c.backend), -c.metric("quality/kl_mean"), c.name),
        default=None,
    )
    if best is not None:
        return best
    said = []
    for one in candidates:
        if one.verdict == PASS:
            said.append(f"{one.name}: PASS, but it {_stays_back(one, left[one.report.digest])}")
        else:
            said.append(f"{one.name}: {one.verdict}" + (f" ({one.reasons[0]})" if one.reasons else ""))
    raise GateRefusal(f"no candidate passed: {'; '.join(said)}" if said else "there is no candidate: run stage=evaluate first")


def _stays_back(candidate: Candidate, when: str) -> str:
    return f"was rolled back at {when}: judge it anew, on other samples, or ask for it with promote.name='{candidate.name}'"


def promote(
    candidates: Sequence[Candidate],
    log: MoveLog,
    replay: Replay,
    decide: Decide,
    *,
    sweep: str,
    name: str | None = None,
    rival: Candidate | None = None,
) -> Move:
    """Make the best candidate that passed the champion, or the one that was asked for by its `name`, which is the only one.

    The `rival` is the champion, which stays where none of them is better; a name displaces it in any case.
    """
    best = choose(candidates) if name is not None else choose(candidates, log.read().rolled_back("champion"))
    if rival is not None and name is None and choose([best, rival]) is rival and _holds(rival, replay, decide):
        return Move(rival.name, f"{rival.name} (version {rival.version}) stays the champion")
    try:
        covered = verify(best, replay, decide).covered
    except (GateRefusal, MissingRequirement) as error:
        raise type(error)(f"{best.name} is not promoted: {error}") from error
    version, registry = best.version, log.registry
    with log.changing() as history:
        old, previous = registry.alias("champion"), registry.alias("previous")
        if old == version:
            return Move(best.name, f"{best.name} (version {version}) is the champion already")
        since = history.rolled_back("champion").get(best.report.digest)
        if since is not None and name is None:  # by somebody else, while the evidence was replayed
            raise GateRefusal(f"{best.name} is not promoted: it {_stays_back(best, since)}")
        tags = {
            "promoted_by_sweep": sweep,
            "promoted_over": old or "",
            "evidence": f"engine {best.engine.digest} baseline {best.baseline.digest} report {best.report.digest}",
        }
        if covered is not None:
            tags |= {"max_tokens": str(covered.tokens), "max_batch": str(covered.batch)}
            if covered.decoded is not None:
                tags |= {"max_decoded": str(covered.decoded), "exercised": ", ".join(covered.acts)}
        log.append(
            history,
            "promote",
            f"best of sweep {sweep}" if name is None else f"asked for by name, of sweep {sweep}",
            aliases={"champion": version, "previous": old if old is not None else previous},
            before={"champion": old, "previous": previous},
            reports={version: best.report.digest},
            tags={version: tags},
        )
    over = f" over version {old}" if old is not None else ""
    note = f"; it had been rolled back at {since}" if since is not None else ""
    held = f", {covered}" if covered is not None else ""
    return Move(best.name, f"{best.name} (version {version}) is the champion{over}{note}{held}")


def _holds(candidate: Candidate, replay: Replay, decide: Decide) -> bool:
    """Return whether a candidate's evidence holds: one whose evidence does not keeps no other one out."""
    try:
        verify(candidate, replay, decide)
    except (GateRefusal, MissingRequirement):
        return False
    return True


Prove = Callable[[Version], None]
"""Replays the evidence of a version. Raises what `verify` does."""


def rollback(log: MoveLog, prove: Prove) -> Move:
    """Bring the previous champion back, once its evidence was replayed."""
    registry = log.registry
    with log.changing(urgent=True) as history:
        bad, previous = registry.alias("champion"), registry.alias("previous")
        if bad is None or previous is None or previous == bad:
            raise UserError("stage=rollback: there is no previous champion to return to; run stage=promote with a better one")
        tags = registry.tags(previous)
        if tags is None:
            raise UserError(f"stage=rollback: version {previous}, the previous champion, was deleted from the registry")
        try:
            prove(Version(previous, tags))
        except (GateRefusal, MissingRequirement) as error:
            raise type(error)(f"stage=rollback: version {previous} does not serve again: {error}") from error
        left = (registry.tags(bad) or {}).get("report_digest", "")
        log.append(
            history,
            "rollback",
            f"version {previous} serves again",
            aliases={"champion": previous, "previous": None},
            before={"champion": bad, "previous": previous},
            reports={bad: left, previous: tags.get("report_digest", "")},
            tags={bad: {}},
        )
    name = tags.get("kv", f"version {previous}")
    return Move(name, f"{name} (version {previous}) is the champion again, version {bad} is not")
