"""Greedy answers that are right, candidate - baseline, paired by sample: what they can show beside their probability.

A kind of work, or a context bin, FAILs when the exact inferiority test clears Holm's level (its upper bound lies below
-margin). All answers together PASS when the exact non-inferiority test clears the look's level. Few answers show no margin, so
that a PASS of the verdict does not need it: where it is not shown the line is a WARNING, and INCONCLUSIVE where more than
DOUBTFUL of the margin was lost, which more samples settle.

Where no sample has an answer the distances decide alone, with `min_samples` documents or more.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from pydantic import Field

from pipeline import statistics
from pipeline.core.errors import UserError
from pipeline.verdict import thresholds
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.report import Accuracy, SampleRow
from pipeline.verdict.thresholds import MOST_SAMPLES, Check, LineStatus, Margin

if TYPE_CHECKING:
    from pipeline.statistics.paired import Pairs

ACCURACY, ALL = "accuracy", "all"
DOUBTFUL = 0.75
"""Of the margin: three of 60 answers. int8 on SmolLM2 loses as many in 2 % of 60 at most, with ten points lost besides in 90 %
or more (`tests/long/test_gates_simulation.py`)."""
LEAST_LEVEL = 1e-15
"""First looks of later attempts have smaller levels, down to 0, whose bounds do not say how many samples are missing."""


class Limits(thresholds.Limits):
    margin: Margin = 0.05
    """Accuracy that a candidate may lose, as a fraction: 0.05 is five points."""
    margins: dict[str, Margin] = Field(default={})
    """Margins of single workloads, in place of `margin`: +gates.margins.retrieval=0.02."""

    def check_margins(self, workloads: Collection[str]) -> None:
        """Check that every margin is of one of the workloads that have answers. Raises UserError for any other."""
        for name, margin in self.margins.items():
            if name not in workloads:
                names = ", ".join(sorted(workloads)) or "none of the workloads"
                raise UserError(f"gates.margins.{name}={margin:g}: {name} has no answers to judge; {names} could have a margin")


@dataclass(frozen=True)
class _Answers:
    """The paired answers of one workload, or of one context bin of it."""

    name: str
    """The workload, `workload [low, high)`, or "all"."""
    counted: Accuracy
    margin: float
    pairs: "Pairs"
    """Counts for the tests, smaller than those seen where samples share documents."""

    @classmethod
    def of(cls, name: str, rows: Sequence[SampleRow], limits: Limits) -> "_Answers":
        """Count the answers of `rows`, which are judged samples."""
        differences = [int(bool(row.candidate_correct)) - int(bool(row.baseline_correct)) for row in rows]
        pairs = statistics.paired.effective_pairs(differences, [row.document for row in rows])
        margins = {} if name == ALL else limits.margins
        return cls(name, Accuracy.of(rows), margins.get(rows[0].workload, limits.margin), pairs)

    @property
    def inferiority(self) -> float:
        return statistics.paired.inferiority_p(self.pairs, self.margin)

    def check(self, status: LineStatus, alpha: float, advice: str = "") -> Check:
        lower = status != "FAIL"
        bound = statistics.paired.difference_bound(self.pairs, alpha, lower)
        counted = self.counted
        shown = (
            "these answers are too few to show that no more than the margin is lost,"
            if status == "WARNING"
            else f"{'lower' if lower else 'upper'} {100 * (1 - alpha):.4g} % bound {bound:+.3f} "
            f"{'below' if status == 'FAIL' else 'above' if bound > -self.margin else 'not above'} the margin"
        )
        return Check(
            gate=ACCURACY,
            where=self.name,
            value=counted.difference,
            bound=bound,
            threshold=-self.margin,
            status=status,
            reason=(
                f"{self.name}: {counted.lost} of {counted.judged} answers lost, {counted.gained} gained; accuracy "
                f"{counted.candidate:.3f} vs {counted.baseline:.3f}, {shown} {-self.margin:+.3f}{advice}"
            ),
        )


def _bins(evidence: Evidence, limits: Limits) -> Iterator[_Answers]:
    judged = by_workload(evidence.judged)
    for part in evidence.report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        rows = judged.get(part.workload, [])
        inside = [row for row in rows if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(rows):  # else the bin is the whole workload, which has a line of its own
            yield _Answers.of(part.place, inside, limits)


def _needed(evidence: Evidence, limits: Limits, still_open: Collection[str]) -> dict[str, int]:
    """Return with how many samples of each kind of work the next attempt would show all answers to hold, with `power`, if their
    rates stay the same: a bound comes nearer with the root of the samples.

    Where more than the margin was lost no number of samples would: MOST_SAMPLES.
    """
    if ALL not in still_open:
        return {}
    every, level = _Answers.of(ALL, evidence.judged, limits), max(evidence.look.pass_level(limits.pass_alpha), LEAST_LEVEL)
    difference = every.counted.difference
    room = difference + every.margin
    short = difference - statistics.paired.difference_bound(every.pairs, level, lower=True)
    below, power, below_now = map(NormalDist().inv_cdf, (limits.next_attempt.pass_alpha, limits.power, level))
    times = (short / room * (power - below) / -below_now) ** 2 if room > 0 else MOST_SAMPLES
    counts = {name: math.ceil(times * len(rows)) for name, rows in by_workload(evidence.judged).items()}
    return {name: min(count, MOST_SAMPLES) for name, count in counts.items()}


@gate(
    Limits,
    {ACCURACY: Line("Right answers", "points that the policy gains or loses against FP16", per="workload")},
    rank=20,
    looks=True,
    needed=_needed,
)
def accuracy(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test all answers together for a PASS, and each kind of work and context bin for a FAIL, at Holm's levels."""
    judged, look = evidence.judged, evidence.look
    if not judged:
        return
    yield _together(_Answers.of(ALL, judged, limits), look.pass_level(limits.pass_alpha))
    kinds = [_Answers.of(name, rows, limits) for name, rows in by_workload(judged).items()]
    for family in (kinds, list(_bins(evidence, limits))):
        bad = [one.inferiority for one in family]
        levels = statistics.paired.holm_levels(bad, limits.alpha, look.fail_level)
        for one, p, level in zip(family, bad, levels, strict=True):
            if p <= level:
                yield one.check("FAIL", level)


def _together(every: _Answers, level: float) -> Check:
    """Return the line of all answers: PASS where they are shown to hold, INCONCLUSIVE where they look as if they did not."""
    counted = every.counted
    if statistics.paired.noninferiority_p(every.pairs, every.margin) <= level:
        status: LineStatus = "PASS"
    elif counted.difference < -DOUBTFUL * every.margin:
        status = "INCONCLUSIVE"
    else:
        status = "WARNING"
    candidate, baseline = counted.candidate_probability, counted.baseline_probability
    gained = 0.0 if candidate is None or baseline is None else candidate - baseline
    said = contradiction(counted.difference, gained)
    return every.check(status, level, said and f"; the candidate {said}")


def contradiction(answers: float, probability: float) -> str:
    """Say that greedy answers and the probability of right ones change in opposite directions; nothing where they do not.

    Args:
        answers: Right answers of the candidate less those of the baseline.
        probability: The same of their probability.
    """
    if answers * probability >= 0:
        return ""
    moved = ("gains", "loses") if probability > 0 else ("loses", "gains")
    return f"{moved[0]} probability of right answers and {moved[1]} greedy ones"


@gate(
    thresholds.Limits,
    {"min_samples": Line("Documents", "of distances that decide alone, because no sample has an answer", per="all")},
    rank=22,
    looks=True,
    needed=lambda _, limits, still_open: {"all": limits.min_samples} if still_open else {},
)
def documents(evidence: Evidence, limits: thresholds.Limits) -> Iterator[Check]:
    """Decide whether distances may decide alone where no sample has an answer.

    Documents are counted, because samples of one document are alike, and those of all workloads together, because the whole
    report must show enough (few prose samples beside judged ones are fine).
    """
    if evidence.judged:
        return
    count, least = len({row.document for row in evidence.rows}), limits.min_samples
    yield Check(
        gate="min_samples",
        where="all",
        value=count,
        threshold=least,
        status="PASS" if count >= least else "INCONCLUSIVE",
        reason=f"all: no sample has an answer to judge, {count} documents have distances; gates.min_samples is {least}",
    )
