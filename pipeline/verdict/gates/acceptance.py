"""What speculative decoding loses: the acceptance length of drafts, candidate against baseline, answer by answer."""

import math
from collections.abc import Iterator

from pipeline import statistics
from pipeline.verdict import thresholds
from pipeline.verdict.gates.distances import compared, means
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.report import Acceptance
from pipeline.verdict.thresholds import Check, Margin

KEY = "max_acceptance_loss"


class Limits(thresholds.Limits):
    max_acceptance_loss: Margin = 0.1
    """Share of the baseline's acceptance length under speculative decoding that a candidate may lose, per workload and drafter,
    where `workloads.speculation` measures it."""


@gate(
    Limits,
    {KEY: Line("Acceptance loss", "share of the tokens a pass under speculative decoding", per="workload")},
    rank=21,
    looks=True,
    tests=lambda report, rows: len(report.drafters) * len({row.workload for row in rows if row.judged}),
)
def acceptance(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test the loss of acceptance length of every drafter and workload, the same at every look, because it is a bet.

    An answer's loss is the log of the baseline's tokens a pass over the candidate's, so that answers which gain by chance make
    up for those that lose. An answer that was not drafted fails; a drafter that met no answers is a WARNING.
    """
    limit = -math.log1p(-limits.max_acceptance_loss)
    for drafter in evidence.report.drafters:
        for workload, rows in by_workload(evidence.judged).items():
            values = means(rows, [_log_loss(row.acceptance.get(drafter)) for row in rows], [1.0] * len(rows))
            mean = statistics.bets.Mean(values, limit, -statistics.bets.OUTLIER * limit)
            result = mean.test(limits.alpha / evidence.together, limits.pass_alpha)
            where = f"{workload}, drafts by {drafter}"
            threshold = limits.max_acceptance_loss
            yield compared(KEY, where, "loss of acceptance length", result, threshold, lambda loss: -math.expm1(-loss))
        if not evidence.judged:
            reason = f"all: the acceptance length of drafts by {drafter} was not measured: no sample has an answer"
            where, threshold = f"all, drafts by {drafter}", limits.max_acceptance_loss
            yield Check(gate=KEY, where=where, value=None, threshold=threshold, status="WARNING", reason=reason)


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)
