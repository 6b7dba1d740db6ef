"""The gates on the engine itself: conformance, stress test, allocated bytes, free answers, full pool and delivered scales."""

from collections.abc import Iterator, Sequence

from stages.policies.delivery import describe_changes
from stages.verdict.conformance import describe, describe_bound
from stages.verdict.figures import GateInput
from stages.verdict.thresholds import Thresholds
from stages.verdict.verdict import Check, Gate, LineStatus, Status

SHOWN = 4
"""Maximum number of failures that a reason lists."""


def conformance(evidence: GateInput, _: Thresholds) -> Iterator[Check]:
    """Yield a check per engine: FAIL if a request differs by more than rounding, INCONCLUSIVE if none was compared."""
    record = evidence.report.conformance
    if record is None:
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
    """Yield the checks of the candidate's stress test, and of both engines' free answers.

    An engine fails if it deviates from the reference engine on random tokens, allocates other bytes than its policy claims,
    or gives a free answer that contradicts forced decode. The baseline is not served, so it has no stress test. Neither has a
    candidate that failed the questions: if other thresholds pass it later, it is INCONCLUSIVE.
    """
    stress = evidence.report.tests.stress
    if stress is None and evidence.report.conformance is not None:
        text = f"{Gate.STRESS_TEST}: it did not run, because the engine failed the questions"
        yield Check.of(Gate.STRESS_TEST, "candidate", status="INCONCLUSIVE", text=text)
    if stress is not None:
        yield _line(Gate.STRESS_TEST, "candidate", stress.failures, str(stress))
        yield _line(Gate.ALLOCATION, "candidate", list(filter(None, [stress.allocation])), "allocated bytes match the policy")
    for where, tests in (("candidate", evidence.report.tests), ("baseline", evidence.report.baseline_tests)):
        free = tests.free_answers
        text = f"free and forced answers agree on {free.tokens} tokens of {free.samples} samples"
        if free.samples:
            text += f", {describe_bound(free.samples, 'contradict themselves')}"
        yield _line(Gate.FREE_ANSWERS, where, free.contradictions, text)


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
    elif status == "PASS":
        text += f", {describe_bound(pool.requests_per_round, 'change')}"
    else:
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
