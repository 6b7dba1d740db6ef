"""The gate on greedy answers, which can only fail a candidate."""

from collections.abc import Iterator, Sequence

from stages.verdict.bets import OUTLIER, Mean
from stages.verdict.gate import Figure, GateInput, by_workload, means
from stages.verdict.report import Accuracy, SampleRow
from stages.verdict.thresholds import MARGIN, Gate, Thresholds


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
