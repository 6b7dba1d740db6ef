"""The gates on answers: recovery, greedy answers, and the acceptance length of speculative decoding.

Forced decode gives the probability of a question's right answer under both engines. Recovery, the kept share, is the sum of the
candidate's probabilities divided by the sum of the baseline's. A PASS needs recovery, because a probability says more about a
question than whether its greedy answer flipped (Miller 2024, arXiv 2411.00640). No document's loss is capped. The bet assumes
that no document loses more than WORST times the limit; a greater loss ends the larger stake. With MIN_T_DOCUMENTS, the
recovery can also pass by Student's t, but only at the last look.

`python -m benchmarks.gates` shows how often the bet and the t test together pass wrongly, on measured rows.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from stages.verdict.bets import OUTLIER, Mean, Result, document_totals
from stages.verdict.figures import Figure, GateInput, by_workload, describe_recovery, means
from stages.verdict.report import Acceptance, Accuracy, SampleRow
from stages.verdict.verdict import ALL, MARGIN, MAX_SAMPLES, Check, Gate, LineStatus, Thresholds

WORST = 2.0
"""Maximum loss of a document that the bet assumes, as a multiple of the limit. At the larger stake, a document without
loss doubles the score."""
BET_SHARE, STUDENT_SHARE = 0.2, 0.1
"""Shares of a PASS's level for the bet and for Student's t. The rest is for documents that are worse than the bet assumes: if
a few questions are broken and the others are perfect, candidates at the limit pass about five times more often than the bet's
level (`python -m benchmarks.gates`)."""


@dataclass(frozen=True, kw_only=True)
class Recovery(Figure):
    """The recovery of one workload or of all questions. The mean is the lost probability."""

    baseline: float
    """Mean probability of the right answers."""
    thresholds: Thresholds
    bet_share: float = BET_SHARE
    student_share: float = STUDENT_SHARE

    @classmethod
    def from_rows(cls, place: str, rows: Sequence[SampleRow], thresholds: Thresholds) -> "Recovery":
        """Return the recovery of judged samples. `place`: their workload, or ALL."""
        threshold = thresholds.min_recovery if place == ALL else thresholds.min_workload_recovery
        documents = [row.document for row in rows]
        baseline_totals = document_totals([row.baseline_probability for row in rows], documents)
        candidate_totals = document_totals([row.candidate_probability for row in rows], documents)
        baseline = float(baseline_totals.mean())
        # The allowed loss of a document is proportional to its baseline probability: a candidate that keeps the share
        # `threshold` of every document is exactly at the limit.
        limit = (1 - threshold) * baseline
        loss = limit - (candidate_totals - threshold * baseline_totals)
        return cls(
            gate=Gate.RECOVERY,
            where=place,
            mean=Mean(loss, limit, best=-OUTLIER * limit, worst=WORST * limit, uncapped=True),
            threshold=threshold,
            baseline=baseline,
            thresholds=thresholds,
        )

    @property
    def is_weak(self) -> bool:
        """Whether the baseline's right answers are too improbable to show a loss."""
        return not (self.baseline > 0 and self.baseline >= self.thresholds.min_baseline_probability)

    def test(self, fail_level: float, pass_level: float, *, last: bool) -> Result:
        if self.baseline <= 0:
            return Result(decision=None, value=math.nan, bound=math.nan, level=pass_level)
        return super().test(fail_level, pass_level, last=last)

    def check(self, result: Result) -> Check:
        value = self._kept(result.value)
        bound = self._kept(result.bound)
        documents = len(self.mean.values)
        advice = ""
        if result.decision != "FAIL" and self.is_weak:
            advice = (
                f"; their mean probability under the baseline, {self.baseline:.2g}, is below gates.min_baseline_probability "
                f"({self.thresholds.min_baseline_probability:g}): ask questions that the model can answer"
            )
            advice += f", or leave {self.where} out" if self.where != ALL else ""
        elif result.decision == "PASS" and documents < self.thresholds.min_samples:
            advice = f"; {documents} documents, gates.min_samples is {self.thresholds.min_samples}"
        status: LineStatus = "INCONCLUSIVE" if advice else result.decision or "INCONCLUSIVE"
        key = Gate.RECOVERY if self.where == ALL else "min_workload_recovery"
        certainty = f"the bound has {100 * (1 - result.level):.4g} % certainty"
        text = f"{describe_recovery(value, bound, status)}; {certainty}, {key} is {100 * self.threshold:g} %{advice}"
        return Check.of(self.gate, self.where, status=status, text=text, value=value, threshold=self.threshold, bound=bound)

    def _kept(self, loss: float) -> float:
        return 1 - loss / self.baseline if self.baseline > 0 else math.nan


def recovery(evidence: GateInput, thresholds: Thresholds) -> Iterator[Recovery]:
    """Yield a figure for all questions together, then one for every workload."""
    judged = evidence.judged
    for place, rows in [(ALL, judged), *by_workload(judged).items()] if judged else ():
        yield Recovery.from_rows(place, rows, thresholds)


def times_needed(evidence: GateInput, later: Thresholds, still_open: Collection[str]) -> float:
    """Return the multiple of the samples that would decide every recovery at the next attempt, if its documents are like these.

    Recoveries that passed count too, because the next attempt has a smaller share of ALPHA. The result is 0 if no recovery is
    inconclusive, or if more samples would not help because the baseline is rarely right. `still_open` are the workloads, or
    ALL, whose recovery is inconclusive.
    """
    figures = list(recovery(evidence, later)) if still_open else []
    if not figures or figures[0].is_weak:
        return 0.0
    level, times = later.pass_alpha, 1.0
    for figure in figures:
        if not figure.is_weak:
            documents = len(figure.mean.values)
            more = figure.mean.needed_documents(BET_SHARE * level, MAX_SAMPLES, STUDENT_SHARE * level)
            times = max(times, max(later.min_samples, documents + (figure.where in still_open), more) / documents)
    return times


def _lost_answers(place: str, rows: Sequence[SampleRow]) -> Figure:
    """Return the figure on the answers of one workload or context bin: the share of lost minus gained answers."""
    lost = [float(bool(row.baseline_correct)) - float(bool(row.candidate_correct)) for row in rows]
    counted = Accuracy.from_rows(rows)
    label = (
        f"{counted.lost} of {counted.judged} answers lost, {counted.gained} gained; accuracy {counted.candidate:.3f} vs "
        f"{counted.baseline:.3f}, change"
    )
    mean = Mean(means(rows, lost), MARGIN, best=-OUTLIER * MARGIN)
    return Figure(
        gate=Gate.ACCURACY, where=place, mean=mean, threshold=-MARGIN, label=label, to_shown=lambda loss: -loss, must_pass=False
    )


def accuracy(evidence: GateInput, _: Thresholds) -> Iterator[Figure]:
    """Yield a figure for every workload, and for every context bin that is not a whole workload."""
    judged = by_workload(evidence.judged)
    for name, rows in judged.items():
        yield _lost_answers(name, rows)
    for part in evidence.report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        rows = judged.get(part.workload, [])
        inside = [row for row in rows if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(rows):
            yield _lost_answers(part.place, inside)


def acceptance(evidence: GateInput, thresholds: Thresholds) -> Iterator[Figure]:
    """Yield the loss of acceptance length of every drafter and workload.

    The loss of an answer is the log of the ratio between the baseline's tokens per pass and the candidate's. With the log,
    random gains and losses cancel out. An answer without counts fails.
    """
    limit = -math.log1p(-thresholds.max_acceptance_loss)
    for drafter in evidence.report.drafters:
        for workload, rows in by_workload(evidence.judged).items():
            values = means(rows, [_log_loss(row.acceptance.get(drafter)) for row in rows])
            yield Figure(
                gate=Gate.ACCEPTANCE,
                where=f"{workload}, drafts by {drafter}",
                mean=Mean(values, limit, best=-OUTLIER * limit),
                threshold=thresholds.max_acceptance_loss,
                label="loss of acceptance length",
                to_shown=lambda loss: -math.expm1(-loss),
            )


def unmeasured_acceptance(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield a WARNING for every drafter if no sample has an answer."""
    for drafter in () if evidence.judged else evidence.report.drafters:
        yield Check.of(
            Gate.ACCEPTANCE,
            f"all, drafts by {drafter}",
            status="WARNING",
            text="the acceptance length was not measured: no sample has an answer",
            threshold=thresholds.max_acceptance_loss,
        )


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)
