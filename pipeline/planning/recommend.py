"""Which policy to take: of those whose evidence covers the use, the one that holds the most live tokens. It is pure.

What a verdict covers is what was exercised (`pipeline.verdict.coverage`), and a use asks four things of it:

- Tokens: quality over length shows at that length alone, so that samples reached the longest context (whole pages count).
- Decoding: errors add up over an answer, so that some sample decoded as many tokens as the longest answer.
- Batch: a batch changes no quality, only whether the engine computes it. So the stress test's batches count like those of
  samples, and they reach `capacity.concurrency`. How many the memory admits may be more: the recommendation says to serve no
  more at once than were exercised together.
- A shared prefix: forks of a sequence were exercised, by samples or by the probe.

Several evaluations of one policy: the engine that was judged last counts, and a FAIL of that engine in any of them outweighs
a PASS in another, so that asking again until it passes is no way through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.core.backends import serves_last
from pipeline.core.kv import KVPolicy, whole_pages
from pipeline.core.strict import StrictModel
from pipeline.planning.capacity import Capacity, PolicyCapacity
from pipeline.planning.use import CapacityConfig
from pipeline.verdict.coverage import Limits
from pipeline.verdict.thresholds import Status

NO_EVIDENCE = "no evidence"


@dataclass(frozen=True)
class Judged:
    """One evaluation of an engine, as its evidence shows it now, decided again by the present gates."""

    policy: KVPolicy
    source: str
    """Where the evidence is."""
    made: float
    """When, in seconds since 1970."""
    backend: str
    engine_digest: str
    problem: str | None = None
    """Why it does not count: altered, or of another model, backend, weights or number of GPUs."""
    status: Status = "INCONCLUSIVE"
    reasons: tuple[str, ...] = ()
    attempt: int = 1
    """`gates.attempt` of the evaluation."""
    samples_needed: dict[str, int] = field(default_factory=dict)
    limits: Limits | None = None
    longest_decode: int = 0
    """Most tokens that a sample decoded."""
    forks: int = 0
    """Forks of sequences, by samples and by the probe."""
    kl_mean: float = float("inf")


class Choice(StrictModel):
    """The policy to take."""

    name: str
    policy: KVPolicy
    live_tokens: int
    requests: int
    """Requests that the memory admits."""
    serve_at_most: int
    """Of those, at once: as many as were exercised together."""
    covered: str
    backend: str
    evidence: str
    engine_digest: str
    reasons: list[str]


class PassedOver(StrictModel):
    """A policy that is not taken."""

    name: str
    live_tokens: int
    reason: str
    """Why, with the keys of the evaluation that would make the evidence which is missing."""
    evidence: str | None


class Recommendation(StrictModel):
    """`recommendation.json`."""

    model: str
    use: CapacityConfig
    notes: list[str]
    chosen: Choice | None
    passed_over: list[PassedOver]
    """By live tokens, the most first."""


def recommend(capacity: Capacity, judged: Sequence[Judged], notes: Sequence[str] = ()) -> Recommendation:
    """Choose a policy, by the evidence on each; `notes` are what a reader has to know of the evidence."""
    ordered = sorted(capacity.policies, key=_order, reverse=True)
    assessed = [(entry, *_assess(entry, judged, capacity.use)) for entry in ordered]
    covering = [(entry, one) for entry, one, reason in assessed if one is not None and reason is None]
    best = max(covering, key=lambda pair: (*_order(pair[0]), not serves_last(pair[1].backend), -pair[1].kl_mean), default=None)
    passed = []
    for entry, one, reason in assessed:
        if reason is None and best is not None and entry is not best[0]:
            fewer = entry.live_tokens < best[0].live_tokens
            but = "fewer live tokens" if fewer else "as many live tokens in more bytes, or a larger KL"
            reason = f"PASS, and the evidence covers this use, but {but}"  # noqa: PLW2901
        if reason is not None:
            source = None if one is None else one.source
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


def _choice(entry: PolicyCapacity, one: Judged) -> Choice:
    assert one.limits is not None, "evidence that covers a use says how far it holds"
    return Choice(
        name=entry.name,
        policy=entry.policy,
        live_tokens=entry.live_tokens,
        requests=entry.requests,
        serve_at_most=min(entry.requests, one.limits.batch or 0),
        covered=str(one.limits),
        backend=one.backend,
        evidence=one.source,
        engine_digest=one.engine_digest,
        reasons=list(one.reasons),
    )


def _assess(entry: PolicyCapacity, judged: Sequence[Judged], use: CapacityConfig) -> tuple[Judged | None, str | None]:
    """Return the evidence on a policy that counts, and why it does not cover the use; None where it does."""
    if entry.requests < use.concurrency:
        return None, f"admits {entry.requests} of {use.concurrency} requests at once"
    own = sorted((one for one in judged if one.policy == entry.policy), key=lambda one: one.made)
    counting = [one for one in own if one.problem is None]
    if not counting:
        return None, f"no evidence that counts: {own[-1].problem}" if own else NO_EVIDENCE
    of_engine = [one for one in reversed(counting) if one.engine_digest == counting[-1].engine_digest]
    failed = next((one for one in of_engine if one.status == "FAIL"), None)
    if failed is not None:
        return failed, f"FAIL: {_first(failed)}"
    passes = [one for one in of_engine if one.status == "PASS"]
    if not passes:
        last = of_engine[0]
        more = [f"++workloads.samples.{name}={count}" for name, count in last.samples_needed.items() if name != "all"]
        again = " ".join([*more, f"gates.attempt={last.attempt + 1}"])
        return last, f"INCONCLUSIVE: {_first(last)}; judge it again with {again}"
    best = min(passes, key=lambda one: bool(_missing(one, use)))
    missing = _missing(best, use)
    return best, f"PASS, but {'; '.join(missing)}" if missing else None


def _first(one: Judged) -> str:
    return one.reasons[0] if one.reasons else "no reason was given"


def _missing(one: Judged, use: CapacityConfig) -> list[str]:
    """Return what of the use the evidence does not cover, and what an evaluation has to ask to cover it."""
    if one.limits is None:
        return ["its report does not say how far it holds: judge it again"]
    missing: list[str] = []
    tokens, batch = one.limits.tokens or 0, one.limits.batch or 0
    if whole_pages(tokens) < use.longest:
        missing.append(
            f"covered up to {tokens:,} tokens and {use.longest:,} are asked: ask samples that long (workloads=jsonl)"
        )
    if one.longest_decode < use.new_tokens:
        missing.append(
            f"no sample decoded more than {one.longest_decode:,} tokens and answers of {use.new_tokens:,} are asked: ask "
            f"samples with such answers and workloads.max_scored_tokens={use.new_tokens}"
        )
    if use.shared_prefix_tokens and not one.forks:
        missing.append("no shared prefix was exercised: give samples a common document")
    if batch < use.concurrency:
        missing.append(
            f"covered up to batch {batch} and {use.concurrency} requests at once are asked: "
            f"workloads.probe.max_batch={use.concurrency}"
        )
    return missing
