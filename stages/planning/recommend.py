"""Recommends the policy with the most live tokens among the policies whose evidence covers the use.

This module reads and writes no files. A verdict covers only the exercised range (`stages.verdict.coverage`). A use has four
requirements on this range:

- Tokens: quality at a length shows only at this length. So samples must have reached the longest context, in whole pages.
- Decoding: errors add up over an answer. So a sample must have decoded at least the tokens of the longest answer.
- Batch: a batch does not change quality, only whether the engine computes correctly. So the stress test's batches count like
  batches of samples, and must reach `capacity.concurrency`. If the memory admits more requests, the recommendation still says
  to serve no more at once than were exercised together.
- Shared prefix: samples or the stress test must have exercised forks of a sequence.

If a policy has several evaluations, the engine that was judged last counts. A FAIL of this engine in any evaluation outweighs
a PASS in another, so that repeating an evaluation until it passes does not help.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stages.core.strict import StrictModel
from stages.engines.config import is_least_preferred
from stages.planning.capacity import Capacity, CapacityConfig, PolicyCapacity
from stages.policies.policy import KVPolicy, whole_pages
from stages.verdict.coverage import FORKS, Limits
from stages.verdict.verdict import MAX_ATTEMPTS, Status
from stages.workloads.config import WorkloadsConfig

NO_EVIDENCE = "no evidence"
NOT_SERVED = "the backend does not serve it"


@dataclass(frozen=True)
class Judged:
    """One evaluation of an engine, read from its evidence and decided again by the present gates."""

    policy: KVPolicy
    source: str
    made: float
    """Time of the evaluation, in seconds since 1970."""
    backend: str
    engine_digest: str
    problem: str | None = None
    """Reason why it does not count: altered, or of another model, backend, weights or number of GPUs."""
    status: Status = "INCONCLUSIVE"
    reasons: tuple[str, ...] = ()
    attempt: int = 1
    times_needed: float = 0.0
    """Multiple of the samples that would decide an INCONCLUSIVE; 0 if it is unknown."""
    workloads: WorkloadsConfig | None = None
    """Configuration of its samples; None if it is unknown."""
    limits: Limits | None = None
    kl_mean: float = float("inf")


class Choice(StrictModel):
    name: str
    policy: KVPolicy
    live_tokens: int
    requests: int
    """Requests that the memory admits."""
    serve_at_most: int
    """Maximum number of requests to serve at once. It is the smaller of `requests` and of the largest batch that the evidence
    covers."""
    covered: str
    backend: str
    evidence: str
    engine_digest: str
    reasons: list[str]


class PassedOver(StrictModel):
    """A policy that is not recommended."""

    name: str
    live_tokens: int
    reason: str
    """Reason, with the keys of an evaluation that would provide the missing evidence."""
    evidence: str | None


class Recommendation(StrictModel):
    """`recommendation.json`."""

    model: str
    use: CapacityConfig
    notes: list[str]
    chosen: Choice | None
    passed_over: list[PassedOver]
    """Sorted by live tokens, descending."""

    @property
    def unjudged(self) -> list[PassedOver]:
        """Policies without evidence that would hold at least the live tokens of the chosen policy."""
        least = 0 if self.chosen is None else self.chosen.live_tokens
        return [entry for entry in self.passed_over if entry.reason == NO_EVIDENCE and entry.live_tokens >= least]


def recommend(
    capacity: Capacity, judged: Sequence[Judged], notes: Sequence[str] = (), unserved: Collection[str] = ()
) -> Recommendation:
    """Choose a policy by its evidence. `notes` are caveats; `unserved` are policies that the backend refuses."""
    ordered = sorted(capacity.policies, key=_order, reverse=True)
    assessed = [
        (entry, None, NOT_SERVED) if entry.name in unserved else (entry, *_assess(entry, judged, capacity.use))
        for entry in ordered
    ]
    covering = [(entry, evidence) for entry, evidence, reason in assessed if evidence is not None and reason is None]
    best = max(
        covering, key=lambda pair: (*_order(pair[0]), not is_least_preferred(pair[1].backend), -pair[1].kl_mean), default=None
    )
    passed = []
    for entry, evidence, reason in assessed:
        if reason is None and best is not None and entry is not best[0]:
            fewer = entry.live_tokens < best[0].live_tokens
            but = "fewer live tokens" if fewer else "as many live tokens in more bytes, or a larger KL"
            reason = f"PASS, and the evidence covers this use, but {but}"  # noqa: PLW2901
        if reason is not None:
            source = None if evidence is None else evidence.source
            passed.append(PassedOver(name=entry.name, live_tokens=entry.live_tokens, reason=reason, evidence=source))
    return Recommendation(
        model=capacity.model,
        use=capacity.use,
        notes=[*capacity.notes, *notes],
        chosen=None if best is None else _choice(*best),
        passed_over=passed,
    )


def _order(entry: PolicyCapacity) -> tuple[int, int]:
    return entry.live_tokens, -entry.mix_bytes


def _choice(entry: PolicyCapacity, evidence: Judged) -> Choice:
    assert evidence.limits is not None, "evidence that covers a use says how far it holds"
    return Choice(
        name=entry.name,
        policy=entry.policy,
        live_tokens=entry.live_tokens,
        requests=entry.requests,
        serve_at_most=min(entry.requests, evidence.limits.batch or 0),
        covered=str(evidence.limits),
        backend=evidence.backend,
        evidence=evidence.source,
        engine_digest=evidence.engine_digest,
        reasons=list(evidence.reasons),
    )


def _assess(entry: PolicyCapacity, judged: Sequence[Judged], use: CapacityConfig) -> tuple[Judged | None, str | None]:
    """Return the evidence that counts for a policy, and why it does not cover the use (None if it does)."""
    if entry.requests < use.concurrency:
        return None, f"admits {entry.requests} of {use.concurrency} requests at once"
    of_policy = sorted((item for item in judged if item.policy == entry.policy), key=lambda item: item.made)
    counting = [item for item in of_policy if item.problem is None]
    if not counting:
        return None, f"no evidence that counts: {of_policy[-1].problem}" if of_policy else NO_EVIDENCE
    of_engine = [item for item in reversed(counting) if item.engine_digest == counting[-1].engine_digest]
    failed = next((item for item in of_engine if item.status == "FAIL"), None)
    if failed is not None:
        return failed, f"FAIL: {_first_reason(failed)}"
    passes = [item for item in of_engine if item.status == "PASS"]
    if not passes:
        last = of_engine[0]
        if last.attempt == MAX_ATTEMPTS:
            return last, f"INCONCLUSIVE: {_first_reason(last)}; gates.attempt={last.attempt} was the last attempt"
        own = last.workloads is not None and last.workloads.jsonl is not None
        file = ["workloads=jsonl workloads.jsonl=FILE"] if own else []
        more = last.workloads.more_questions(last.times_needed) if last.workloads is not None and last.times_needed else []
        again = " ".join([*file, *more, f"gates.attempt={last.attempt + 1}"])
        asked = ", after adding questions to your FILE" if own else ""
        return last, f"INCONCLUSIVE: {_first_reason(last)}; judge it again with {again}{asked}"
    best = min(passes, key=lambda item: bool(_find_gaps(item, use)))
    missing = _find_gaps(best, use)
    return best, f"PASS, but {'; '.join(missing)}" if missing else None


def _first_reason(evidence: Judged) -> str:
    return evidence.reasons[0] if evidence.reasons else "no reason was given"


def _find_gaps(evidence: Judged, use: CapacityConfig) -> list[str]:
    """Return the gaps between the use and the evidence, each with the samples or keys that would close the gap."""
    if evidence.limits is None:
        return ["its report records no limits: judge it again"]
    missing: list[str] = []
    tokens, batch = evidence.limits.tokens or 0, evidence.limits.batch or 0
    if whole_pages(tokens) < use.longest:
        missing.append(
            f"covered up to {tokens:,} tokens and {use.longest:,} are needed: workloads.lengths=[{whole_pages(use.longest)}]"
        )
    decoded = evidence.limits.decoded or 0
    if decoded < use.new_tokens:
        missing.append(
            f"no sample decoded more than {decoded:,} tokens and answers of {use.new_tokens:,} are needed: "
            f"ask your own questions with such references (workloads=jsonl), with workloads.max_scored_tokens={use.new_tokens}"
        )
    if use.shared_prefix_tokens and FORKS not in evidence.limits.features:
        missing.append("no shared prefix was exercised: give samples a common document")
    if batch < use.concurrency:
        missing.append(
            f"covered up to batch {batch} and {use.concurrency} requests at once are needed: "
            f"workloads.batch_size={use.concurrency}"
        )
    return missing
