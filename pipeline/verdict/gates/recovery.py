"""Recovery: the share of the probability of the right answers that the candidate keeps, of all questions and by kind of work.

Forced decode gives the probability of a question's right answer under both engines, and recovery is the sum of the candidate's
over the sum of the baseline's. A PASS needs it: one number a question says more than whether a greedy answer flipped (Miller
2024, arXiv 2411.00640). A document that was asked counts whole. The bet assumes that no document loses more than WORST times
the limit, and a document that does ends its larger stake. MANY documents also pass by Student's t, at the last look alone.

`python -m benchmarks.gates` shows how often both together pass wrongly on rows that were measured.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import statistics
from pipeline.verdict.registry import Evidence, Figure, by_workload
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import MOST_SAMPLES, Check, Gates

if TYPE_CHECKING:
    from pipeline.statistics.bets import Result

RECOVERY = "min_recovery"
ALL = "all"
WORST = 2.0
"""What a document may lose for the bet to go on, in limits: a document that loses nothing doubles the score."""
BET, STUDENT = 0.2, 0.1
"""Shares of a PASS's level that the bet takes, and Student's t. The rest is for documents that are worse than the bet assumes:
where few questions are broken and the others are perfect, candidates at the limit pass about five times as often as the bet's
level says (`python -m benchmarks.gates`)."""


def kept(value: float, bound: float, status: str) -> str:
    """Say a recovery and its bound, which are shares, as people say it."""
    judgement = {"PASS": "at least", "FAIL": "at most"}.get(status, "no more is shown than")
    return f"keeps {100 * value:.1f} % of the probability of right answers ({judgement} {100 * bound:.1f} %)"


@dataclass(frozen=True)
class Recovery(Figure):
    """The questions of one kind of work, or all of them. The mean is that of the lost probability."""

    samples: int = 0
    baseline: float = 0.0
    """Mean probability of the right answers."""

    @classmethod
    def of(cls, place: str, rows: Sequence[SampleRow], gates: Gates) -> "Recovery":
        threshold = gates.min_recovery if place == ALL else gates.min_workload_recovery
        documents = [row.document for row in rows]
        before = statistics.bets.document_totals([row.baseline_probability for row in rows], documents)
        after = statistics.bets.document_totals([row.candidate_probability for row in rows], documents)
        baseline = float(before.mean())
        # What a document may lose is in proportion to what it has: on the limit is who keeps `threshold` of each document.
        loss, limit = (1 - threshold) * baseline - (after - threshold * before), (1 - threshold) * baseline
        mean = statistics.bets.Mean(loss, limit, -statistics.bets.OUTLIER * limit, WORST * limit, whole=True)
        return cls(RECOVERY, place, mean, threshold, samples=len(rows), baseline=baseline)

    def is_weak(self, gates: Gates) -> bool:
        """Whether the baseline's right answers are too improbable to lose anything."""
        return not (self.baseline > 0 and self.baseline >= gates.min_baseline_probability)

    def test(self, fail_level: float, gates: Gates, *, last: bool) -> "Result":
        if self.baseline <= 0:
            return statistics.bets.Result(None, math.nan, math.nan, gates.pass_alpha)
        return self.mean.test(fail_level, BET * gates.pass_alpha, STUDENT * gates.pass_alpha if last else 0.0)

    def check(self, result: "Result", gates: Gates) -> Check:
        value, bound = (1 - loss / self.baseline if self.baseline > 0 else math.nan for loss in (result.value, result.bound))
        documents, advice = len(self.mean.values), ""
        if result.decision != "FAIL" and self.is_weak(gates):
            advice = (
                f"; their mean probability under the baseline, {self.baseline:.2g}, is below gates.min_baseline_probability "
                f"({gates.min_baseline_probability:g}): ask what the model can do"
            )
            advice += f", or leave {self.where} out" if self.where != ALL else ""
        elif result.decision == "PASS" and documents < gates.min_samples:
            advice = f"; {documents} documents, gates.min_samples is {gates.min_samples}"
        status = "INCONCLUSIVE" if advice else result.decision or "INCONCLUSIVE"
        key = RECOVERY if self.where == ALL else "min_workload_recovery"
        reason = (
            f"{self.where}: {kept(value, bound, status)} with {100 * (1 - result.level):.4g} % certainty, "
            f"{key} is {100 * self.threshold:g} %{advice}"
        )
        return self.line(result, value, bound, reason).model_copy(update={"status": status})


def recovery(evidence: Evidence, gates: Gates) -> Iterator[Recovery]:
    """Yield all questions together and each kind of work."""
    judged = evidence.judged
    for place, rows in [(ALL, judged), *by_workload(judged).items()] if judged else ():
        yield Recovery.of(place, rows, gates)


def needed(evidence: Evidence, gates: Gates, still_open: Collection[str]) -> dict[str, int]:
    """Return with how many samples of each kind of work the next attempt would decide, if its documents are like these.

    Kinds that passed are among them, because the next attempt errs with less. A kind that the baseline rarely gets right has
    none: more of the same samples would not help.
    """
    kinds = list(recovery(evidence, gates)) if still_open else []
    if not kinds or kinds[0].is_weak(gates):
        return {}
    level, times = gates.next_attempt.pass_alpha, dict.fromkeys((kind.where for kind in kinds), 1.0)
    for kind in kinds:
        if not kind.is_weak(gates):
            seen = len(kind.mean.values)
            more = kind.mean.needed(BET * level, MOST_SAMPLES, STUDENT * level)
            times[kind.where] = max(gates.min_samples, seen + (kind.where in still_open), more) / seen
    counts = {kind.where: kind.samples for kind in kinds if kind.where != ALL}
    asked = {name: math.ceil(count * max(times[ALL], times[name])) for name, count in counts.items()}
    return {name: min(count, MOST_SAMPLES) for name, count in asked.items() if count > counts[name]}
