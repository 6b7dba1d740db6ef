"""The gates on greedy answers, which can only fail a candidate, and on the acceptance length of speculative decoding."""

import math
from collections.abc import Iterator, Sequence

from stages.verdict.bets import OUTLIER, Mean
from stages.verdict.gate import Figure, GateInput, by_workload, means
from stages.verdict.report import Acceptance, Accuracy, SampleRow
from stages.verdict.thresholds import MARGIN, Check, Gate, Thresholds


def _answers(place: str, rows: Sequence[SampleRow]) -> Figure:
    """Return the figure on the answers of one workload or context bin: the share of lost minus gained answers."""
    lost = [float(bool(row.baseline_correct)) - float(bool(row.candidate_correct)) for row in rows]
    counted = Accuracy.of(rows)
    label = (
        f"{counted.lost} of {counted.judged} answers lost, {counted.gained} gained; accuracy {counted.candidate:.3f} vs "
        f"{counted.baseline:.3f}, change"
    )
    mean = Mean(means(rows, lost), MARGIN, -OUTLIER * MARGIN)
    return Figure(Gate.ACCURACY, place, mean, -MARGIN, label, lambda loss: -loss, must_pass=False)


def accuracy(evidence: GateInput, _: Thresholds) -> Iterator[Figure]:
    """Yield a figure for every workload, and for every context bin that is not a whole workload."""
    judged = by_workload(evidence.judged)
    for name, rows in judged.items():
        yield _answers(name, rows)
    for part in evidence.report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        rows = judged.get(part.workload, [])
        inside = [row for row in rows if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(rows):
            yield _answers(part.place, inside)


def acceptance(evidence: GateInput, thresholds: Thresholds) -> Iterator[Figure]:
    """Yield the loss of acceptance length of every drafter and workload.

    The loss of an answer is the log of the ratio between the baseline's tokens per pass and the candidate's. With the log,
    random gains and losses cancel out. An answer that was not drafted fails.
    """
    limit, threshold = -math.log1p(-thresholds.max_acceptance_loss), thresholds.max_acceptance_loss
    for drafter in evidence.report.drafters:
        for workload, rows in by_workload(evidence.judged).items():
            values = means(rows, [_log_loss(row.acceptance.get(drafter)) for row in rows])
            where, label = f"{workload}, drafts by {drafter}", "loss of acceptance length"
            mean = Mean(values, limit, -OUTLIER * limit)
            yield Figure(Gate.ACCEPTANCE, where, mean, threshold, label, lambda loss: -math.expm1(-loss))


def unmeasured(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield a WARNING for every drafter if no sample has an answer."""
    for drafter in () if evidence.judged else evidence.report.drafters:
        where, text = f"all, drafts by {drafter}", "the acceptance length was not measured: no sample has an answer"
        yield Check.of(Gate.ACCEPTANCE, where, "WARNING", text, threshold=thresholds.max_acceptance_loss)


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)
