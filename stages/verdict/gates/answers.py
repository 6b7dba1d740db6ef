"""The gates on greedy answers, which can only fail a candidate, and on the acceptance length of speculative decoding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.verdict.bets import OUTLIER, Mean, Result
from stages.verdict.gate import Figure, Gate, GateInput, by_workload, means
from stages.verdict.report import Acceptance, Accuracy, SampleRow
from stages.verdict.thresholds import MARGIN, Check, Thresholds


@dataclass(frozen=True)
class Answers(Figure):
    """The paired answers of one workload or context bin. The mean is the share of lost minus gained answers."""

    rows: Sequence[SampleRow] = ()

    @classmethod
    def of(cls, place: str, rows: Sequence[SampleRow]) -> "Answers":
        lost = [float(bool(row.baseline_correct)) - float(bool(row.candidate_correct)) for row in rows]
        mean = Mean(means(rows, lost), MARGIN, -OUTLIER * MARGIN)
        return cls(Gate.ACCURACY, place, mean, -MARGIN, must_pass=False, rows=rows)

    def check(self, result: Result, thresholds: Thresholds) -> Check:  # noqa: ARG002
        counted = Accuracy.of(self.rows)
        reason = (
            f"{self.where}: {counted.lost} of {counted.judged} answers lost, {counted.gained} gained; accuracy "
            f"{counted.candidate:.3f} vs {counted.baseline:.3f}, upper {100 * (1 - result.level):.4g} % bound "
            f"{-result.bound:+.3f} below the margin {-MARGIN:+.3f}"
        )
        return self.line(result, -result.value, -result.bound, reason)


def accuracy(evidence: GateInput, _: Thresholds) -> Iterator[Answers]:
    """Yield a figure for every workload, and for every context bin that is not a whole workload."""
    judged = by_workload(evidence.judged)
    for name, rows in judged.items():
        yield Answers.of(name, rows)
    for part in evidence.report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        rows = judged.get(part.workload, [])
        inside = [row for row in rows if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(rows):
            yield Answers.of(part.place, inside)


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
        where, threshold = f"all, drafts by {drafter}", thresholds.max_acceptance_loss
        reason = f"all: the acceptance length of drafts by {drafter} was not measured: no sample has an answer"
        yield Check(gate=Gate.ACCEPTANCE, where=where, value=None, threshold=threshold, status="WARNING", reason=reason)


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)
