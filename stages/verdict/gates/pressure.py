"""The gate on a full pool: requests that wait, reuse prefixes and are preempted must answer as they do in a large pool."""

from collections.abc import Iterator

from stages.verdict.conformance import bounded
from stages.verdict.gate import GateInput
from stages.verdict.thresholds import Check, Gates, Status

SHOWN = 3


def pressure(evidence: GateInput, _: Gates) -> Iterator[Check]:
    """Yield a FAIL if a request differs from itself in a large pool by more than noise; INCONCLUSIVE if no pool was full."""
    found = evidence.report.tests.pressure
    if found is None:
        return
    told = (
        f"{found.requests} requests gave the same answers in a pool of {found.pages} pages (they need {found.wanted_pages}): "
        f"{found.preempted} preemptions, {found.reused:,} tokens reused"
    )
    status: Status = "FAIL" if found.deviations else "PASS" if found.preempted else "INCONCLUSIVE"
    if not found.requests:
        told = (
            f"workloads.pressure={found.asked}: the engine cannot be given a small pool, and nothing was seen under load; "
            "judge it with workloads.pressure=0"
        )
    elif status == "FAIL":
        more = f"; and {len(found.deviations) - SHOWN} more" if len(found.deviations) > SHOWN else ""
        told = f"{len(found.deviations)} of {found.requests} requests differ ({found.limit_kl:.1e} allowed): "
        told += "; ".join(map(str, found.deviations[:SHOWN])) + more
    elif status == "PASS":
        told += f", {bounded(found.asked, 'change')}"
    else:
        told += f": the pool was never full; ask more requests with workloads.pressure={2 * found.asked}"
    yield Check(
        gate="pressure",
        where="candidate",
        value=len(found.deviations) if found.requests else None,
        threshold=0,
        status=status,
        reason=f"candidate: pressure: {told}",
    )
