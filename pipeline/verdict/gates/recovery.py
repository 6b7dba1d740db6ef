"""Recovery: the share of the probability of the right answers that the candidate keeps, of all questions and by kind of work.

Forced decode gives the probability of a question's right answer under both engines, and recovery is the sum of the candidate's
over the sum of the baseline's. A PASS needs it: one number a question says more than whether a greedy answer flipped (Miller
2024, arXiv 2411.00640). Documents are what is tested, by a bet (`pipeline.statistics.bounds`): a document that was seen counts
whole, one that was not is taken to lose at most OUTLIER times the limit. Of many documents Student's t shows more.

`python -m benchmarks.gate_recovery` shows how often the bet passes wrongly on rows that were measured.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline import statistics
from pipeline.verdict import thresholds
from pipeline.verdict.record import finite
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import MOST_SAMPLES, Check, LineStatus, Share

if TYPE_CHECKING:
    from pipeline.statistics.bets import Mean, Result

RECOVERY = "min_recovery"
ALL = "all"
BET, STUDENT = 0.4, 1 / 15
"""Shares of a PASS's level that the bet takes, and Student's t over all looks. The rest is for what the bet assumes: where one
question in eight is broken and the others are perfect, candidates at the limit pass more than twice as often as the bet's level
says (`python -m benchmarks.gate_recovery`)."""
_Kept = Annotated[float, Field(gt=0, lt=1)]


class Limits(thresholds.Limits):
    min_recovery: _Kept = 0.95
    """Share of the probability of right answers that the candidate keeps, over all questions: llm-compressor's rule."""
    min_workload_recovery: _Kept = 0.8
    """The same for each kind of work. It is what 15 questions can show without passing broken caches."""
    min_baseline_probability: Share = 0.02
    """A kind of work whose right answers are less probable under the baseline, in the mean, has nothing to lose: no PASS."""


def kept(value: float, bound: float, status: LineStatus) -> str:
    """Say a recovery and its bound, which are shares, as people say it."""
    judgement = {"PASS": "at least", "FAIL": "at most"}.get(status, "no more is shown than")
    return f"keeps {100 * value:.1f} % of the probability of right answers ({judgement} {100 * bound:.1f} %)"


@dataclass(frozen=True)
class _Kind:
    """The questions of one kind of work, or all of them."""

    place: str
    rows: Sequence[SampleRow]
    limit: float
    baseline: float
    """Mean probability of the right answers."""
    loss: "Mean"
    """Of each document; its mean is that of the lost probability."""

    @classmethod
    def of(cls, place: str, rows: Sequence[SampleRow], limits: Limits) -> "_Kind":
        limit = limits.min_recovery if place == ALL else limits.min_workload_recovery
        documents = [row.document for row in rows]
        before = statistics.bounds.document_totals([row.baseline_probability for row in rows], documents)
        after = statistics.bounds.document_totals([row.candidate_probability for row in rows], documents)
        mean = float(before.mean())
        # What a document may lose is in proportion to what it has.
        loss = before - after - (1 - limit) * (before - mean)
        worst = (1 - limit) * mean
        return cls(place, rows, limit, mean, statistics.bets.Mean(loss, worst, -statistics.bets.OUTLIER * worst, whole=True))

    def recovery(self, loss: float) -> float:
        """Return the recovery of a mean loss."""
        return 1 - loss / self.baseline if self.baseline > 0 else math.nan

    def check(self, limits: Limits, result: "Result") -> Check:
        """Return the line of a test's result."""
        status: LineStatus = result.decision or "INCONCLUSIVE"
        value, bound = self.recovery(float(self.loss.values.mean())), self.recovery(result.bound)
        documents, advice = len(self.loss.values), ""
        if status != "FAIL" and not self.baseline >= limits.min_baseline_probability:
            status = "INCONCLUSIVE"
            advice = (
                f"; their mean probability under the baseline, {self.baseline:.2g}, is below gates.min_baseline_probability "
                f"({limits.min_baseline_probability:g}): ask what the model can do"
            )
            advice += f", or leave {self.place} out" if self.place != ALL else ""
        elif status == "PASS" and documents < limits.min_samples:
            status, advice = "INCONCLUSIVE", f"; {documents} documents, gates.min_samples is {limits.min_samples}"
        key = RECOVERY if self.place == ALL else "min_workload_recovery"
        return Check(
            gate=RECOVERY,
            where=self.place,
            value=finite(value),
            bound=finite(bound),
            threshold=self.limit,
            status=status,
            reason=(
                f"{self.place}: {kept(value, bound, status)} with {100 * (1 - result.level):.4g} % certainty, "
                f"{key} is {100 * self.limit:g} %{advice}"
            ),
        )


def _kinds(evidence: Evidence, limits: Limits) -> list[_Kind]:
    judged = evidence.judged
    if not judged:
        return []
    return [_Kind.of(place, rows, limits) for place, rows in [(ALL, judged), *by_workload(judged).items()]]


def _needed(evidence: Evidence, limits: Limits, still_open: Collection[str]) -> dict[str, int]:
    """Return with how many samples of each kind of work the next attempt would decide, if its documents are like these.

    Kinds that passed are among them, because the next attempt errs with less. A kind that the baseline rarely gets right has
    none: more of the same samples would not help.
    """
    kinds = _kinds(evidence, limits) if still_open else []
    if not kinds or not kinds[0].baseline >= limits.min_baseline_probability:
        return {}
    level, times = limits.next_attempt.pass_alpha, dict.fromkeys((kind.place for kind in kinds), 1.0)
    for kind in kinds:
        if kind.baseline >= limits.min_baseline_probability:
            seen = len(kind.loss.values)
            more = kind.loss.needed(BET * level, limits.power, MOST_SAMPLES, STUDENT * level)
            times[kind.place] = max(limits.min_samples, seen + (kind.place in still_open), more) / seen
    counts = {kind.place: len(kind.rows) for kind in kinds if kind.place != ALL}
    needed = {name: math.ceil(count * max(times[ALL], times[name])) for name, count in counts.items()}
    return {name: min(count, MOST_SAMPLES) for name, count in needed.items() if count > counts[name]}


@gate(
    Limits,
    {RECOVERY: Line("Recovery", "share of the probability of right answers that is kept", per="workload", equal=1.0)},
    rank=19,
    looks=True,
    is_main=True,
    needed=_needed,
)
def recovery(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test all questions together and each kind of work. A wrong FAIL of any has `gates.alpha` (Bonferroni)."""
    kinds = _kinds(evidence, limits)
    levels = BET * limits.pass_alpha, evidence.look.pass_level(STUDENT * limits.pass_alpha)
    for kind in kinds:
        yield kind.check(limits, kind.loss.test(limits.alpha / len(kinds), *levels))
