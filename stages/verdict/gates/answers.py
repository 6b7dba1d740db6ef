"""The gate on greedy answers: right answers that the candidate loses. It can only fail a candidate; recovery shows a PASS."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.verdict import statistics
from stages.verdict.gate import Figure, GateInput, by_workload
from stages.verdict.report import Accuracy, SampleRow
from stages.verdict.thresholds import Check, Gates

if TYPE_CHECKING:
    from stages.verdict.statistics.bets import Result

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Answers(Figure):
    """The paired answers of one workload or context bin. The mean is the share of lost minus gained answers."""

    rows: Sequence[SampleRow] = ()

    @classmethod
    def of(cls, place: str, rows: Sequence[SampleRow], gates: Gates) -> "Answers":
        lost = [float(bool(row.baseline_correct)) - float(bool(row.candidate_correct)) for row in rows]
        values = statistics.bets.by_document(lost, [1.0] * len(rows), [row.document for row in rows])
        mean = statistics.bets.Mean(values, gates.margin, -statistics.bets.OUTLIER * gates.margin)
        return cls(ACCURACY, place, mean, -gates.margin, must_pass=False, rows=rows)

    def check(self, result: "Result", gates: Gates) -> Check:
        counted = Accuracy.of(self.rows)
        reason = (
            f"{self.where}: {counted.lost} of {counted.judged} answers lost, {counted.gained} gained; accuracy "
            f"{counted.candidate:.3f} vs {counted.baseline:.3f}, upper {100 * (1 - result.level):.4g} % bound "
            f"{-result.bound:+.3f} below the margin {-gates.margin:+.3f}"
        )
        return self.line(result, -result.value, -result.bound, reason)


def accuracy(evidence: GateInput, gates: Gates) -> Iterator[Answers]:
    """Yield a figure for every workload, and for every context bin that is not a whole workload."""
    judged = by_workload(evidence.judged)
    for name, rows in judged.items():
        yield Answers.of(name, rows, gates)
    for part in evidence.report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        rows = judged.get(part.workload, [])
        inside = [row for row in rows if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(rows):
            yield Answers.of(part.place, inside, gates)


def contradiction(answers: float, probability: float) -> str:
    """Return a clause that greedy answers and the probability of right answers change in opposite directions; "" if not.

    Args:
        answers: Right greedy answers of the candidate minus the baseline's.
        probability: Probability of right answers under the candidate minus the baseline's.
    """
    if answers * probability >= 0:
        return ""
    moved = ("gains", "loses") if probability > 0 else ("loses", "gains")
    return f"{moved[0]} probability of right answers and {moved[1]} greedy ones"
