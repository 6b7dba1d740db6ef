"""Promotion decides which engine serves: it chooses a candidate, verifies its evidence again and moves aliases.

The aliases are `candidate` (the last registered version that did not fail; removed if the same engine then fails), `champion`
(the version that serves) and `previous` (the version that the champion replaced). Evidence is found by the digest that the
registry cites. Before a promotion or a rollback, the evidence is replayed and the gates decide again: the command's gates for a
promotion, the recorded gates for a rollback.

A promotion tags the version with its author, the time and the replaced version. A rollback makes `previous` the champion and
removes `previous`, so a second rollback (two people, a CI retry) is an error and does not bring the bad engine back. A version
that was rolled back is chosen again only after a new evaluation (another report) or by name. A candidate that was tested on
much shorter contexts than the champion is chosen only by name.

An engine may pass by chance if it is judged on one set of questions after the other. So an engine that did not pass on other
questions is chosen only if `gates.attempt` is greater than the number of these sets, or by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeline.registry.moves import Move, make_moves, route_back, route_of
from pipeline.registry.run_content import author
from pipeline.registry.tracking import CHAMPION, LostFiles, RegisteredModel, Version
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.engines.config import is_least_preferred
from stages.policies.policy import KVPolicy
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Check

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

PROMOTED_BY, PROMOTED_AT, PROMOTED_OVER = "promoted_by", "promoted_at", "promoted_over"
ROLLED_BACK_BY, ROLLED_BACK_AT, ROLLED_BACK_TO = "rolled_back_by", "rolled_back_at", "rolled_back_to"
"""Tags of a version: who promoted it, when, and over which version; who rolled it back, when, and to which version."""
TESTED_TOKENS = "quality/covered_tokens"
"""Metric: the longest context that the evaluation tested, in tokens."""
MIN_TESTED_SHARE = 0.5
"""Minimum tested context of a candidate that is promoted without promote.name, as a share of the champion's tested context. The
share is below 1 because two evaluations rarely ask questions of exactly the same lengths."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class PromotionMove:
    champion: str
    message: str
    candidates: tuple[Candidate, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Name of a candidate that does not serve -> the reason."""


def is_attempt(checks: Sequence[Check]) -> bool:
    """Return whether an evaluation counts as an attempt: a FAIL, or questions alone prevented a PASS.

    In a quick check, for example, no questions could have given a PASS.
    """
    undecided = [check.gate.samples_decide for check in checks if check.status == "INCONCLUSIVE"]
    return any(check.status == "FAIL" for check in checks) or (bool(undecided) and all(undecided))


def live_tokens(candidate: Candidate) -> float:
    """Return the number of live tokens that fit into the memory that all evaluations assume; -inf if unknown."""
    return candidate.metrics.get("memory/max_live_tokens", -math.inf)


@dataclass(frozen=True, kw_only=True)
class RegisteredEngine:
    candidate: Candidate
    """Decided again by the command's gates, or as recorded (for a rollback)."""
    beyond: str | None
    """How the engine's bundle exceeds the limits that the verdict covers; None if it stays within them."""
    policy: KVPolicy
    workloads: frozenset[str]
    questions: str
    """Digest of the questions (`EvaluationReport.workloads_digest`)."""
    replay: Callable[[], GateRefusal | MissingRequirement | None]
    """Checks the evidence again; returns the refusal if some part is not the same (`pipeline.evidence.reading`)."""

    @cached_property
    def problem(self) -> GateRefusal | MissingRequirement | None:
        """Refusal of an engine whose evidence differs, whose verdict is no PASS, or that exceeds its tested limits.

        MissingRequirement if no part differs, but a file, a library or the user's questions are missing; None if all hold. The
        evidence is replayed only once, because that takes seconds.
        """
        refusal = self.replay()
        if refusal is None and self.candidate.verdict != "PASS":
            reasons = "; ".join(self.candidate.reasons)
            refusal = GateRefusal(f"judged again from its recorded samples, it is {self.candidate.verdict}: {reasons}")
        return refusal or (None if self.beyond is None else GateRefusal(self.beyond))

    def verify(self) -> None:
        """Raise the refusal of `problem`, if there is one."""
        if self.problem is not None:
            raise self.problem

    def __str__(self) -> str:
        return f"version {self.candidate.version} ({self.candidate.name})"


@dataclass
class Engines:
    """The registered engines of a model, and the moves of the champion. A command reads the registry and each engine once."""

    registry: "MlflowStore"
    read: Callable[[Version], RegisteredEngine]
    """Returns the engine of a version, read from its artifacts. Raises GateRefusal if the evidence is missing."""
    fetch: Callable[[Version], None] | None = None
    """Downloads the evidence and the engine of a version, so that `read` finds them. Raises GateRefusal if the registry has no
    copy."""
    attempt: int = 1
    """The command's `gates.attempt`."""
    _found: dict[str, RegisteredEngine] = field(default_factory=dict, init=False)
    """Version number -> engine that `find` has returned."""

    @cached_property
    def model(self) -> RegisteredModel:
        return self.registry.read()

    @cached_property
    def _champions_checkpoint(self) -> str | None:
        """Digest of the champion's checkpoint; None if there is no champion or its run does not record it."""
        serving = self.model.pointed_at.get(CHAMPION)
        return None if serving is None else self.registry.judged_by(serving).tags.get("checkpoint_digest")

    def find(self, version: Version, *, fetched: bool = False) -> RegisteredEngine:
        """Return an engine. `fetched`: download missing evidence (gigabytes). Raises GateRefusal if it is missing."""
        if version.number not in self._found:
            self._found[version.number] = self._read(version, self.fetch if fetched else None)
        return self._found[version.number]

    def _read(self, version: Version, fetch: Callable[[Version], None] | None) -> RegisteredEngine:
        try:
            engine = self.read(version)
        except GateRefusal:
            if fetch is None:
                raise
            fetch(version)
            engine = self.read(version)
        if fetch is not None and not engine.candidate.engine.path.is_dir():
            with suppress(GateRefusal):  # without a copy, the replay names the missing parts
                fetch(version)
                engine = self.read(version)
        return engine

    def promote(self, judged: Sequence[Candidate], model: str, name: str | None = None) -> PromotionMove:
        """Make the best candidate that passed the champion, or the candidate that the user requested by `name`.

        `judged` only selects versions: the candidates are read again from the registry and from their evidence. The present
        champion stays if no candidate is better, unless `name` is given. Raises GateRefusal if no candidate passed, or the best
        one is not registered, belongs to another model or is not proven; MissingRequirement as `RegisteredEngine.verify`.
        """
        candidates = self._judge_again(judged, model, name)
        rolled_back = self._rollback_times()
        excluded = self._excluded(candidates, rolled_back) if name is None else {}
        best = choose_champion(candidates, excluded)
        rival, stays = self._compare_champion(candidates, best, excluded) if name is None else (None, False)
        compared = tuple(candidates if rival is None else [*candidates, rival])

        def ended(champion: Candidate, message: str) -> PromotionMove:
            others = {item.name: _why_not(item, excluded, champion.name) for item in compared if item is not champion}
            return PromotionMove(champion.name, message, compared, others)

        if rival is not None and stays:
            return ended(rival, f"{rival.name} (version {rival.version}) stays the champion")
        try:
            self.find(self.model.versions[best.version]).verify()
        except (GateRefusal, MissingRequirement) as error:
            raise type(error)(f"{best.name} is not promoted: {error}") from error
        before = route_of(self.model, CHAMPION)
        if before.now == best.version:
            return ended(best, f"{best.name} (version {best.version}) is the champion already")
        tags = {PROMOTED_BY: author(), PROMOTED_AT: _now(), PROMOTED_OVER: before.now or "none"}

        def record() -> None:
            if name is None and ROLLED_BACK_AT in self.registry.read().versions[best.version].tags:
                raise GateRefusal(f"{best.name} is not promoted: another command rolled it back meanwhile; run it again")
            no_rollback = dict.fromkeys((ROLLED_BACK_BY, ROLLED_BACK_AT, ROLLED_BACK_TO))
            self.registry.set_tags(best.version, {**no_rollback, **tags})

        move = Move(CHAMPION, before, before.moved_to(best.version), record)
        since = rolled_back.get(best.report.digest)
        over = f" over version {before.now}{self._other_checkpoint(best)}" if before.now is not None else ""
        make_moves(self.registry, [move])
        note = f"; it had been rolled back at {since}" if since is not None else ""
        covered = f", {best.covered}" if best.covered is not None else ""
        return ended(best, f"{best.name} (version {best.version}) is the champion{over}{note}{covered}")

    def _other_checkpoint(self, candidate: Candidate) -> str:
        """Return " of another checkpoint" if the champion has one; "" if it has the candidate's, or if either is unknown."""
        digests = {self._champions_checkpoint, candidate.checkpoint}
        return "" if None in digests or len(digests) == 1 else " of another checkpoint"

    def _judge_again(self, candidates: Sequence[Candidate], model: str, name: str | None) -> list[Candidate]:
        """Return the candidates, or only those called `name`, read from their artifacts and decided again."""
        judged: dict[str, Candidate] = {}
        for entry in candidates:
            version = self.model.versions.get(entry.version)
            if name not in (None, entry.name if version is None else version.name):
                continue
            if version is None:
                lost = "it is not registered (tracking.enabled=false?)"
                if entry.version:
                    lost = f"version {entry.version} is not in the registry"
                raise GateRefusal(f"{entry.name} is not promoted: {lost}")
            if entry.identity.digest != version.identity_digest:  # registered under another tracking.model_name
                raise GateRefusal(
                    f"{entry.name} is not promoted: {version} of {self.model.name} is another evaluation; "
                    "give the sweep's tracking.model_name, or another sweep with promote.sweep=ID"
                )
            judged[version.number] = candidate = self.find(version).candidate
            if candidate.model != model:
                raise GateRefusal(f"{candidate.name} is not promoted: {version} is of model {candidate.model}, not {model}")
        return list(judged.values())

    def _compare_champion(
        self, candidates: Sequence[Candidate], best: Candidate, excluded: dict[str, str]
    ) -> tuple[Candidate | None, bool]:
        """Return the champion if it competes, and whether it stays: it is better than `best`, and its evidence still holds.

        It competes if it has a candidate's checkpoint, another name, and still passes. Checkpoints are compared, because a
        rebuilt baseline has another digest. A candidate with the champion's name is newer evidence. If the evidence does not
        hold, `excluded` gets the reason. Raises MissingRequirement if it cannot be verified here.
        """
        serving = self.model.pointed_at.get(CHAMPION)
        if serving is None or serving.name in [candidate.name for candidate in candidates]:
            return None, False
        checkpoints = {candidate.checkpoint for candidate in candidates}
        if self._champions_checkpoint not in {None, *checkpoints}:  # known before a download
            return None, False
        try:
            engine = self.find(serving, fetched=True)
            champion = engine.candidate
            if champion.checkpoint not in checkpoints or champion.verdict != "PASS":
                return None, False
            if choose_champion([best, champion]) is not champion:
                return champion, False
            refusal = engine.problem
            if isinstance(refusal, MissingRequirement):
                raise refusal
        except (GateRefusal, LostFiles):  # another work directory judged it, and the registry has no copy of its engine
            return None, False
        except MissingRequirement as error:
            raise MissingRequirement(
                f"the champion, {serving}, cannot compete: {error}; run it again, or request a candidate with promote.name=NAME"
            ) from error
        if refusal is not None:
            excluded[champion.report.digest] = f"cannot stay the champion: {refusal}"
        return champion, refusal is None

    def _excluded(self, candidates: Sequence[Candidate], rolled_back: Mapping[str, str]) -> dict[str, str]:
        """Return digest of a report -> reason why its candidate is promoted only by name."""
        excluded: dict[str, str] = {}
        serving = self.model.pointed_at.get(CHAMPION)
        needed = self.registry.judged_by(serving).metrics.get(TESTED_TOKENS, 0) if serving is not None else 0
        not_passed = {candidate.engine.digest: candidate for candidate in candidates if candidate.verdict != "PASS"}
        new = [each for each in candidates if each.verdict == "PASS" and (serving is None or each.version != serving.number)]
        failed_attempts = {candidate.report.digest: self._failed_attempts(candidate) for candidate in new}
        for candidate in candidates:
            digest, other = candidate.report.digest, not_passed.get(candidate.engine.digest)
            tested = candidate.metrics.get(TESTED_TOKENS, 0.0)
            if digest in rolled_back:
                why = f"was rolled back at {rolled_back[digest]}: judge it again on other samples"
            elif other is not None:  # the best of several verdicts on one engine would pass too often
                why = f"is the engine of {other.name}, which is {other.verdict} in this sweep: ask more questions in one job"
            elif len(failed := failed_attempts.get(digest, [])) >= self.attempt:
                names = ", ".join(map(str, failed))
                why = f"did not pass on other questions ({names}): decide it with gates.attempt={len(failed) + 1}"
            elif tested < MIN_TESTED_SHARE * needed:
                why = (
                    f"was tested up to {tested:,.0f} tokens, and the champion, {serving}, up to {needed:,.0f}: judge it on "
                    f"longer questions, as with workloads.lengths=[{needed:.0f}]"
                )
            else:
                continue
            excluded[digest] = f"{why}, or request it with promote.name='{candidate.name}'"
        return excluded

    def not_passed(self, candidate: Candidate) -> list[Version]:
        """Return the versions that judged the candidate's engine without a PASS, by what the registry records."""
        # An engine contains its policy's name, with which the display name begins. Each other version costs a request.
        versions = [v for v in self.model.versions.values() if v.name.partition(" ")[0] == candidate.policy]
        others = [version for version in versions if version.tags.get("verdict", "PASS") != "PASS"]
        return [v for v in others if self.registry.judged_by(v).tags.get("engine_digest") == candidate.engine.digest]

    def _failed_attempts(self, candidate: Candidate) -> list[Version]:
        """Return a version for each other set of questions on which the candidate's engine was judged without a PASS.

        Only versions with evidence here count. The command's gates decide them again, so other thresholds do not matter.
        """
        questions = {self.find(self.model.versions[candidate.version]).questions}
        attempts = []
        for version in self.not_passed(candidate):
            with suppress(GateRefusal):
                engine = self.find(version)
                same_baseline = engine.candidate.baseline.digest == candidate.baseline.digest
                if same_baseline and engine.questions not in questions and is_attempt(engine.candidate.checks):
                    questions.add(engine.questions)
                    attempts.append(version)
        return attempts

    def _rollback_times(self) -> dict[str, str]:
        """Return digest of a report -> time at which its engine was rolled back."""
        times = {}
        for version in self.model.versions.values():
            if ROLLED_BACK_AT in version.tags:
                with suppress(GateRefusal):  # without evidence here, it is not a candidate here either
                    times[self.find(version).candidate.report.digest] = version.tags[ROLLED_BACK_AT]
        return times

    def rollback(self) -> PromotionMove:
        """Bring the previous champion back after a replay of its evidence."""
        before = route_of(self.model, CHAMPION)
        try:
            after = route_back(self.model, CHAMPION)
        except GateRefusal as error:
            raise UserError(f"stage=rollback: {error}; promote another candidate with stage=promote") from error
        bad = str(before.now)
        version = self.model.versions[str(after.now)]
        try:
            self.find(version, fetched=True).verify()
        except (GateRefusal, MissingRequirement) as error:
            raise type(error)(f"stage=rollback: {version} cannot become the champion again: {error}") from error
        tags = dict.fromkeys((PROMOTED_BY, PROMOTED_AT, PROMOTED_OVER))
        tags |= {ROLLED_BACK_BY: author(), ROLLED_BACK_AT: _now(), ROLLED_BACK_TO: version.number}
        move = Move(CHAMPION, before, after, lambda: self.registry.set_tags(bad, tags), back=True)
        make_moves(self.registry, [move])
        message = f"{version.name} (version {version.number}) is the champion again, version {bad} is not"
        return PromotionMove(version.name, message)


def choose_champion(candidates: Sequence[Candidate], excluded: Mapping[str, str] = MappingProxyType({})) -> Candidate:
    """Return the best candidate that passed and is not in `excluded` (digest of a report -> reason).

    The candidate with the most live tokens wins. Between equals, other engines win over the reference engine, then the lowest
    mean KL wins. Raises GateRefusal if there is none.
    """
    best = max(
        (candidate for candidate in candidates if candidate.verdict == "PASS" and candidate.report.digest not in excluded),
        key=lambda c: (live_tokens(c), not is_least_preferred(c.backend), -c.metric("quality/kl_mean"), c.name),
        default=None,
    )
    if best is not None:
        return best
    if not candidates:
        raise GateRefusal("there is no candidate: run stage=evaluate first")
    lines = [f"{candidate.name}: {_why_not(candidate, excluded)}" for candidate in candidates]
    passed = any(candidate.verdict == "PASS" for candidate in candidates)
    raise GateRefusal(f"{'no candidate is promoted' if passed else 'no candidate passed'}: {'; '.join(lines)}")


def _why_not(candidate: Candidate, excluded: Mapping[str, str], champion: str = "") -> str:
    """Return why a candidate is not promoted. `champion`: name of the promoted candidate."""
    if candidate.verdict != "PASS":
        return f"{candidate.verdict} ({candidate.reasons[0]})" if candidate.reasons else candidate.verdict
    if candidate.report.digest in excluded:
        return f"PASS, but it {excluded[candidate.report.digest]}"
    return f"passed, but {champion} holds more tokens in the same memory, or as many with a lower mean KL"
