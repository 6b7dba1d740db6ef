"""Engines of other libraries: the scales that they use, compared with the scales of their checkpoint."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from pipeline.verdict import thresholds
from pipeline.verdict.delivery import describe_changes
from pipeline.verdict.registry import Evidence, Line, gate
from pipeline.verdict.thresholds import Check, LineStatus, ScaleChangeKind


class Limits(thresholds.Limits):
    allow_scale_changes: Annotated[tuple[ScaleChangeKind, ...], Field(strict=False)] = ()
    """What another library may do to the scales of a checkpoint. Anything else is refused before it is judged."""


@gate(Limits, {"scale_delivery": Line("Delivered scales", "scales that are not the checkpoint's", per="engine")}, rank=37)
def scale_delivery(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """FAIL where a scale arrived as something else, a WARNING where that is allowed."""
    changes = evidence.report.scale_changes
    if changes is None:
        return
    refused = [change for change in changes if change.kind not in limits.allow_scale_changes]
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
