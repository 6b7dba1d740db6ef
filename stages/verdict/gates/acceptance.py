"""The gate on speculative decoding: the loss of acceptance length from baseline to candidate, answer by answer."""

import math
from collections.abc import Iterator

from stages.verdict import statistics
from stages.verdict.gate import Figure, GateInput, by_workload
from stages.verdict.gates.distances import means
from stages.verdict.report import Acceptance
from stages.verdict.thresholds import Check, Gates

KEY = "max_acceptance_loss"


def acceptance(evidence: GateInput, gates: Gates) -> Iterator[Figure]:
    """Yield the loss of acceptance length of every drafter and workload.

    The loss of an answer is the log of the ratio between the baseline's tokens per pass and the candidate's. With the log,
    random gains and losses cancel out. An answer that was not drafted fails.
    """
    limit, threshold = -math.log1p(-gates.max_acceptance_loss), gates.max_acceptance_loss
    for drafter in evidence.report.drafters:
        for workload, rows in by_workload(evidence.judged).items():
            values = means(rows, [_log_loss(row.acceptance.get(drafter)) for row in rows], [1.0] * len(rows))
            mean = statistics.bets.Mean(values, limit, -statistics.bets.OUTLIER * limit)
            where, label = f"{workload}, drafts by {drafter}", "loss of acceptance length"
            yield Figure(KEY, where, mean, threshold, label, lambda loss: -math.expm1(-loss))


def unmeasured(evidence: GateInput, gates: Gates) -> Iterator[Check]:
    """Yield a WARNING for every drafter if no sample has an answer."""
    for drafter in () if evidence.judged else evidence.report.drafters:
        where, threshold = f"all, drafts by {drafter}", gates.max_acceptance_loss
        reason = f"all: the acceptance length of drafts by {drafter} was not measured: no sample has an answer"
        yield Check(gate=KEY, where=where, value=None, threshold=threshold, status="WARNING", reason=reason)


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)
