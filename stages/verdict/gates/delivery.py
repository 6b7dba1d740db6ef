"""The gate on engines of other libraries: they must use the scales of their checkpoint."""

from collections.abc import Iterator

from stages.verdict.delivery import describe_changes
from stages.verdict.gate import GateInput
from stages.verdict.thresholds import Check, Gates, LineStatus


def scale_delivery(evidence: GateInput, gates: Gates) -> Iterator[Check]:
    """Yield a FAIL if the engine uses other scales than the checkpoint's, or a WARNING if all these changes are allowed."""
    changes = evidence.report.scale_changes
    if changes is None:
        return
    refused = [change for change in changes if change.kind not in gates.allow_scale_changes]
    status: LineStatus = "FAIL" if refused else "WARNING" if changes else "PASS"
    reason = describe_changes(refused or changes) or "the engine uses the scales that its checkpoint carries"
    if changes and not refused:
        reason += ", as gates.allow_scale_changes accepts"
    yield Check(
        gate="scale_delivery",
        where="candidate",
        value=float(len(changes)),
        threshold=0.0,
        status=status,
        reason=f"candidate: scales: {reason}",
    )
