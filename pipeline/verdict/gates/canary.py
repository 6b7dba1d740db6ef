"""The must-fail control: an engine with corrupted key scales, which gates that see the cache have to fail."""

import math
from collections.abc import Iterator, Sequence

from pipeline.verdict.conformance import allowed
from pipeline.verdict.gates.distances import Limits, measured
from pipeline.verdict.record import finite
from pipeline.verdict.registry import Evidence, Line, gate
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import Check


@gate(
    Limits,
    {
        "canary": Line(
            "Must-fail control",
            "mean KL of the policy with corrupted key scales, which has to be noticed",
            per="engine",
            samples_decide=False,
        )
    },
    rank=33,
)
def canary(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """FAIL unless the distances would have failed the engine whose key scales were corrupted.

    A corrupted engine whose logits are not finite counts as noticed.
    """
    rows, factor = evidence.report.canary.rows, evidence.report.canary.factor
    kl, noticed = _noticed(rows, limits)
    outcome = "; it did not run"
    if rows:
        outcome = ", noticed" if noticed else ", and no gate noticed: the evaluation does not see the cache"
    yield Check(
        gate="canary",
        where="canary",
        value=finite(kl),
        threshold=limits.max_mean_kl,
        status="PASS" if noticed else "FAIL",
        reason=f"must-fail control: with key scales x {factor:g} the mean KL is {kl:.3g}{outcome}",
    )


@gate(
    Limits,
    {
        "ladder": Line(
            "Ladder of smaller faults", "planted faults that were noticed; decides nothing", per="engine", always_said=True
        )
    },
    rank=34,
)
def ladder(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Say which of the smaller faults these gates noticed. It decides nothing: it says how far a PASS reaches."""
    rungs, record = evidence.report.canary.ladder, evidence.report.conformance
    if not rungs:
        return
    judged = record is not None and record.compute_dtype is not None
    limit = allowed(record.baseline.requests) if record is not None and judged else math.inf
    noticed = [
        rung.fault
        for rung in rungs
        if _noticed(rung.rows, limits)[1] or any(request.times_allowed(limit) > 1 for request in rung.requests)
    ]
    missed = [rung.fault for rung in rungs if rung.fault not in noticed]
    words = [f"{what}: {', '.join(faults)}" for what, faults in (("noticed", noticed), ("not", missed)) if faults]
    reason = f"planted faults {'; '.join(words)}"
    yield Check(gate="ladder", where="canary", value=len(noticed), status="PASS", reason=reason)


def _noticed(rows: Sequence[SampleRow], limits: Limits) -> tuple[float, bool]:
    """Return the mean KL of a corrupted engine's samples, NaN without any, and whether the distances would fail it."""
    found = [one.mean for one in measured(rows, limits)] if rows else []
    return float(found[0].values.mean()) if found else math.nan, any(mean.fails(limits.alpha) for mean in found)
