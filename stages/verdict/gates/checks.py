"""The checks of the complete report: on the evaluation itself, and on the engine itself.

The evaluation needs complete samples, enough documents, long enough samples, and a low noise floor. The engine is checked by
conformance, stress test, allocated bytes, free answers, full pool and delivered scales.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from stages.core.records import Sample
from stages.policies.scales import describe_changes
from stages.verdict.conformance import describe
from stages.verdict.figures import MIN_SOUND_REQUESTS, GateInput, by_workload
from stages.verdict.gates.distances import shows_none_ruined
from stages.verdict.report import SampleRow
from stages.verdict.verdict import ALL, FAR_KL, Check, Gate, LineStatus, Status, Thresholds

REQUIRED_NUMBERS = ("mean_kl", "max_kl", "baseline_nll", "candidate_nll", "top1_agreement", "top10_overlap")
RECOMMENDED_DOCUMENTS = 60
"""Documents per workload that docs/questions.md recommends: fewer suffice only for a cache that loses nearly nothing."""
UNSEEN = {"kv.eviction": "nothing was evicted", "kv.window": "no token left the window"}
"""Group of policy keys -> clause of the message that the group had no effect."""


def completeness(evidence: GateInput) -> Iterator[Check]:
    """Yield a FAIL if samples are missing or duplicated, if a number is missing or not finite, or if a round is missing."""
    report, rows = evidence.report, evidence.rows
    fail = partial(Check.of, Gate.COMPLETE, status="FAIL")
    if not rows:
        yield fail(ALL, text="no samples were evaluated")
    different = len({row.id for row in rows})
    if len(rows) != report.samples or different != len(rows):
        text = f"the report counts {report.samples} samples, samples.jsonl has {len(rows)} with {different} different ids"
        yield fail(ALL, text=text)
    ran = sorted({row.round for row in rows})
    planned = report.planned_rounds
    if ran != list(range(1, len(ran) + 1)) or len(ran) > planned:
        numbers = ", ".join(map(str, ran))
        yield fail(ALL, text=f"samples.jsonl has rounds {numbers} of 1 to {planned}; rounds start at 1 and have no gaps")
    for workload, part in by_workload(rows).items():
        broken = [row.id for row in part if not _is_complete(row)]
        if broken:
            yield fail(workload, text=f"{len(broken)} of {len(part)} samples lack a finite number or an answer ({broken[0]})")


def _is_complete(row: SampleRow) -> bool:
    values = [getattr(row, name) for name in REQUIRED_NUMBERS]
    measured = all(value is not None and math.isfinite(value) for value in values)
    answered = not row.judged or (row.baseline_correct is not None and row.candidate_correct is not None)
    return measured and answered and row.scored_tokens > 0 and row.non_finite_steps == 0


def documents(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield INCONCLUSIVE for planned workloads that did not run yet, and check the documents if no sample has an answer."""
    workloads = {row.workload for row in evidence.rows}
    judged = {row.workload for row in evidence.judged}
    for name, answered in sorted(evidence.report.planned_workloads.items()):
        if name not in (judged if answered else workloads):
            text = "none of its samples ran yet; they are in a later round"
            yield Check.of(Gate.MIN_SAMPLES, name, status="INCONCLUSIVE", text=text, value=0)
    if not judged:
        count = len({row.document for row in evidence.rows})
        minimum = thresholds.min_samples
        status: Status = "PASS" if count >= minimum else "INCONCLUSIVE"
        text = f"no sample has an answer to judge, {count} documents have distances; gates.min_samples is {minimum}"
        yield Check.of(Gate.MIN_SAMPLES, ALL, status=status, text=text, value=count, threshold=minimum)


def too_few(samples: Sequence[Sample], thresholds: Thresholds) -> str | None:
    """Return, before any work, why no candidate can PASS on these samples; None if they suffice.

    Example: `these questions cannot pass: 10 documents of support, 15 are needed (60 recommended)`.
    """
    by_name: dict[str, set[str]] = {}
    for sample in samples:
        if sample.judged:
            by_name.setdefault(sample.workload, set()).add(sample.cluster)
    if not by_name:  # without answers, distances decide over all texts together
        by_name[ALL] = {sample.cluster for sample in samples}
    missing = []
    if not shows_none_ruined(len({sample.cluster for sample in samples}), len(samples), thresholds):
        minimum = next(count for count in range(1, MIN_SOUND_REQUESTS + 1) if shows_none_ruined(count, count, thresholds))
        alternative = f" (or {minimum} documents)" if minimum < MIN_SOUND_REQUESTS else ""
        missing.append(f"{len(samples)} questions, {MIN_SOUND_REQUESTS} are needed{alternative}")
    needed = thresholds.min_samples
    recommended = f" ({RECOMMENDED_DOCUMENTS} recommended)" if needed < RECOMMENDED_DOCUMENTS else ""
    missing += [
        f"{len(document_ids)} documents{f' of {name}' if name != ALL else ''}, {needed} are needed{recommended}"
        for name, document_ids in sorted(by_name.items())
        if len(document_ids) < needed
    ]
    return f"these questions cannot pass: {'; '.join(missing)}" if missing else None


def takes_effect(evidence: GateInput, _: Thresholds) -> Iterator[Check]:
    """Yield INCONCLUSIVE if a key of the policy takes effect only in sequences longer than every sample."""
    longest = max((row.context_tokens + row.scored_tokens - 1 for row in evidence.rows), default=0)
    tokens, key = max(((tokens, key) for key, tokens in evidence.report.takes_effect.items()), default=(0, ""))
    if longest < tokens:
        unseen = UNSEEN.get(key.rpartition(".")[0], "every token was kept exact")
        text = (
            f"{unseen}: the longest sample has {longest:,} tokens, {key} takes effect from {tokens:,} tokens on; ask longer "
            f"samples, or lower {key}"
        )
        yield Check.of(Gate.TAKES_EFFECT, ALL, status="INCONCLUSIVE", text=text, value=longest, threshold=tokens)


def noise_floor(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield INCONCLUSIVE if the baseline's noise was not measured, or if an engine's noise is not below a gate's KL limit."""
    report = evidence.report
    if report.baseline_tests.noise is None:
        text = "no noise floor was measured; set workloads.noise_samples to 1 or more"
        yield Check.of(Gate.NOISE_FLOOR, "A/A noise", status="INCONCLUSIVE", text=text)
    for engine, noise in (("baseline", report.baseline_tests.noise), ("candidate", report.tests.noise)):
        if noise is None:
            continue
        for limited, label, value, limit in (
            (f"max_mean_kl={thresholds.max_mean_kl:g}", "mean KL", noise.kl_mean, thresholds.max_mean_kl),
            (f"the limit of far tokens, a KL of {FAR_KL:g},", "99.9th percentile of KL", noise.kl_p999, FAR_KL),
        ):
            if value is None or value >= limit:
                shown = "not a number" if value is None else f"{value:.3g}"
                text = f"{limited} is finer than the {engine}'s own noise ({label} {shown})"
                yield Check.of(Gate.NOISE_FLOOR, "A/A noise", status="INCONCLUSIVE", text=text, value=value, threshold=limit)


SHOWN = 4
"""Maximum number of failures that a reason lists."""


def conformance(evidence: GateInput, _: Thresholds) -> Iterator[Check]:
    """Yield a check per engine: FAIL if a request differs by more than rounding, INCONCLUSIVE if none was compared."""
    record = evidence.report.conformance
    if record is None:
        text = "no engine was compared with its reference engine, so no PASS is possible"
        yield Check.of(Gate.CONFORMANCE, ALL, status="INCONCLUSIVE", text=text)
        return
    judged = record.rounding is not None
    for where, engine in (("baseline", record.baseline), ("candidate", record.candidate)):
        ranked = engine.ranked
        status: Status = "INCONCLUSIVE" if not ranked else "FAIL" if judged and ranked[0] > 1 else "PASS"
        yield Check.of(
            Gate.CONFORMANCE,
            where,
            status=status,
            text=describe(engine, judged=judged),
            value=ranked[0] if ranked else None,
            threshold=1.0 if judged else None,
        )


def stress_test(evidence: GateInput, _: Thresholds) -> Iterator[Check]:
    """Yield the checks of the candidate's stress test and free answers.

    An engine fails if it deviates from the reference engine on random tokens, allocates other bytes than its policy claims,
    or gives a free answer that contradicts forced decode. The baseline is not served, so it has neither. A candidate that
    failed the questions has no stress test: if other thresholds pass it later, it is INCONCLUSIVE.
    """
    tests, compared = evidence.report.tests, evidence.report.conformance
    stress, free = tests.stress, tests.free_answers
    if stress is None and compared is not None and compared.candidate.requests:
        text = f"{Gate.STRESS_TEST}: it did not run, because the engine failed the questions"
        yield Check.of(Gate.STRESS_TEST, "candidate", status="INCONCLUSIVE", text=text)
    elif stress is not None:
        yield _line(Gate.STRESS_TEST, "candidate", stress.failures, str(stress))
        yield _line(Gate.ALLOCATION, "candidate", list(filter(None, [stress.allocation])), "allocated bytes match the policy")
    if free is None:
        yield _line(Gate.FREE_ANSWERS, "candidate", ["they were not checked"], "")
        return
    text = f"free and forced answers agree on {free.tokens} tokens of {free.samples} samples"
    yield _line(Gate.FREE_ANSWERS, "candidate", free.contradictions, text)


def _list_failures(failures: Sequence[str]) -> str:
    more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
    return "; ".join(failures[:SHOWN]) + more


def _line(gate: Gate, where: str, failures: Sequence[str], passed: str) -> Check:
    fault = "does not compute its policy: " if gate == Gate.STRESS_TEST else ""
    text = f"{gate}: " + (fault + _list_failures(failures) if failures else passed)
    status: Status = "FAIL" if failures else "PASS"
    return Check.of(gate, where, status=status, text=text, value=len(failures), threshold=0)


def full_pool(evidence: GateInput, _: Thresholds) -> Iterator[Check]:
    """Yield a FAIL if a request differs from itself in a large pool by more than noise; INCONCLUSIVE if no pool was full."""
    pool = evidence.report.tests.full_pool
    if pool is None:
        return
    reused = f", {pool.reused:,} tokens reused" if pool.reused else ""
    text = (
        f"{pool.requests} requests gave the same answers in a pool of {pool.pages} pages (they need {pool.wanted_pages}): "
        f"{pool.preempted} preemptions{reused}"
    )
    status: Status = "FAIL" if pool.deviations else "PASS" if pool.preempted else "INCONCLUSIVE"
    if not pool.requests:
        text = (
            f"workloads.full_pool={pool.requests_per_round}: the engine cannot be given a small pool, so it was not tested "
            "under load; judge it with workloads.full_pool=0"
        )
    elif status == "FAIL":
        text = f"{len(pool.deviations)} of {pool.requests} requests differ ({pool.limit_kl:.1e} allowed): "
        text += _list_failures(pool.deviations)
    elif status == "INCONCLUSIVE":
        text += f": the pool was never full; send more requests with workloads.full_pool={2 * pool.requests_per_round}"
    value = len(pool.deviations) if pool.requests else None
    yield Check.of(Gate.FULL_POOL, "candidate", status=status, text=f"full pool: {text}", value=value, threshold=0)


def scale_delivery(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield a check of the scales that the engine loaded: PASS if they are the checkpoint's.

    A changed scale is a FAIL, unless `allow_scale_changes` allows its kind of change. If all changes are allowed, the status is
    WARNING. Yields no check for an engine that does not load scales by itself.
    """
    changes = evidence.report.scale_changes
    if changes is None:
        return
    refused = [change for change in changes if change.kind not in thresholds.allow_scale_changes]
    status: LineStatus = "FAIL" if refused else "WARNING" if changes else "PASS"
    text = describe_changes(refused or changes) or "the engine uses the scales that its checkpoint carries"
    if changes and not refused:
        text += ", as gates.allow_scale_changes accepts"
    yield Check.of(Gate.SCALE_DELIVERY, "candidate", status=status, text=f"scales: {text}", value=len(changes), threshold=0)
