"""The gate on conformance: every engine must compute its policy like the reference engine, request by request."""

from collections.abc import Iterator

from stages.verdict.conformance import describe
from stages.verdict.gate import GateInput
from stages.verdict.record import finite
from stages.verdict.thresholds import Check, Gates, Status


def conformance(evidence: GateInput, _: Gates) -> Iterator[Check]:
    """Yield a FAIL if any request of an engine differs from the reference engine by more than rounding."""
    record = evidence.report.conformance
    if record is None:
        return
    judged = record.compute_dtype is not None
    for where, engine in (("baseline", record.baseline), ("candidate", record.candidate)):
        ranked = engine.ranked
        status: Status = "INCONCLUSIVE" if not ranked else "FAIL" if judged and ranked[0] > 1 else "PASS"
        yield Check(
            gate="conformance",
            where=where,
            value=finite(ranked[0]) if ranked else None,
            threshold=1.0 if judged else None,
            status=status,
            reason=f"{where}: {describe(engine, judged=judged)}",
        )
