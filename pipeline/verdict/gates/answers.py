"""Right answers, candidate - baseline, paired by sample: non-inferiority per workload, and context bins that are clearly worse.

PASS when the exact non-inferiority test clears the look's level (its lower bound lies above -margin), FAIL when the exact
inferiority test clears Holm's level over workloads (its upper bound lies below). A workload that the baseline itself rarely
gets right cannot show a loss: INCONCLUSIVE. Context bins FAIL by the same test, with Holm's procedure over bins; they are too
small to demand a PASS of.

Where no sample has an answer the distances decide alone, with `min_samples` documents or more.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline import statistics
from pipeline.core.errors import UserError
from pipeline.verdict import thresholds
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import MOST_SAMPLES, Check, Detectable, Looser, Margin, Share, Status

if TYPE_CHECKING:
    from pipeline.statistics.paired import Pairs

ACCURACY = "accuracy"


class Limits(thresholds.Limits):
    margin: Annotated[Margin, Looser.LARGER] = 0.05
    """Accuracy that a candidate may lose, as a fraction: 0.05 is five points."""
    margins: dict[str, Margin] = Field(default={})
    """Margins of single workloads, in place of `margin`: +gates.margins.retrieval=0.02, which needs more samples of it."""
    min_baseline_accuracy: Annotated[Share, Looser.SMALLER] = 0.2
    """A workload that the baseline gets right less often cannot pass: the candidate has nothing to lose there."""

    def margin_of(self, workload: str) -> float:
        """Return the accuracy that a candidate may lose in a workload, as a fraction."""
        return self.margins.get(workload, self.margin)

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
    """The workload, or `workload [low, high)`."""
    rows: Sequence[SampleRow]
    margin: float
    pairs: "Pairs"
    """Counts for the tests, smaller than those seen where samples share documents."""

    @classmethod
    def of(cls, name: str, rows: Sequence[SampleRow], limits: Limits) -> "_Answers":
        """Count the answers of `rows`, which are judged samples of one workload."""
        differences = [int(bool(row.candidate_correct)) - int(bool(row.baseline_correct)) for row in rows]
        pairs = statistics.paired.effective_pairs(differences, [row.document for row in rows])
        return cls(name, rows, limits.margin_of(rows[0].workload), pairs)

    @property
    def baseline(self) -> float:
        """Accuracy of the baseline, 0 to 1."""
        return sum(bool(row.baseline_correct) for row in self.rows) / len(self.rows)

    @property
    def inferiority(self) -> float:
        return statistics.paired.inferiority_p(self.pairs, self.margin)

    @property
    def rates(self) -> tuple[float, float]:
        """Shares of the answers that were lost, and gained."""
        return self.pairs.lost / self.pairs.n, self.pairs.gained / self.pairs.n

    def check(self, status: Status, alpha: float, advice: str = "") -> Check:
        lower = status != "FAIL"
        bound = statistics.paired.difference_bound(self.pairs, alpha, lower)
        lost = sum(bool(row.baseline_correct) and not row.candidate_correct for row in self.rows)
        gained = sum(bool(row.candidate_correct) and not row.baseline_correct for row in self.rows)
        candidate = sum(bool(row.candidate_correct) for row in self.rows) / len(self.rows)
        relation = "below" if status == "FAIL" else "above" if bound > -self.margin else "not above"
        return Check(
            gate=ACCURACY,
            where=self.name,
            value=candidate - self.baseline,
            bound=bound,
            threshold=-self.margin,
            status=status,
            reason=(
                f"{self.name}: {lost} of {len(self.rows)} answers lost, {gained} gained; accuracy {candidate:.3f} vs "
                f"{self.baseline:.3f}, {'lower' if lower else 'upper'} {100 * (1 - alpha):.4g} % bound {bound:+.3f} {relation} "
                f"the margin {-self.margin:+.3f}{advice}"
            ),
        )


def _workloads(evidence: Evidence, limits: Limits) -> list[_Answers]:
    return [_Answers.of(name, rows, limits) for name, rows in by_workload(evidence.judged).items()]


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
    """Return with how many samples another evaluation would decide: for each workload whose answers are open, and for the
    others where they need more samples than they had, because the next attempt errs with less.

    A workload that the baseline rarely gets right has none: more of the same samples would not help.
    """
    every = _workloads(evidence, limits)
    some = [one for one in every if one.baseline >= limits.min_baseline_accuracy]
    if not any(one.name in still_open for one in some):
        return {}
    needed = {one.name: max(limits.min_samples, _samples(one, evidence, limits, len(every))) for one in some}
    return {one.name: needed[one.name] for one in some if one.name in still_open or needed[one.name] > len(one.rows)}


def _samples(answers: _Answers, evidence: Evidence, limits: Limits, workloads: int) -> int:
    """Return the samples with which the next evaluation would decide with `gates.power`, if the rates stay the same.

    The power is that of the test that decides at the last look of the same plan, at the level that the next attempt has there;
    earlier looks only add to it. It is at least the number with which a candidate without flips passes. Where samples share
    documents it grows in proportion, because what was counted is what independent samples would have shown.
    """
    pairs, margin, last = answers.pairs, answers.margin, evidence.look.last
    if abs(margin + pairs.difference) < 1e-9:
        return MOST_SAMPLES
    passes = pairs.difference > -margin
    level = last.pass_level(limits.next_attempt.pass_alpha) if passes else last.fail_level(limits.alpha / workloads)
    enough = statistics.power.samples_to_decide(*answers.rates, margin, level, limits.power, MOST_SAMPLES)
    judged = len(answers.rows)
    return min(MOST_SAMPLES, max(judged + 1, math.ceil(enough * judged / pairs.n)))


def _detectable(evidence: Evidence, limits: Limits) -> dict[str, Detectable]:
    """Return what the last look of this plan could tell of each workload, at as many samples as there are of it.

    Answers that the candidate gains are as many as were seen.
    """
    every, last = _workloads(evidence, limits), evidence.look.last
    levels = last.fail_level(limits.alpha / max(len(every), 1)), last.pass_level(limits.pass_alpha)
    return {one.name: _of_answers(one, limits.power, *levels) for one in every}


def _of_answers(answers: _Answers, power: float, fail_level: float, pass_level: float) -> Detectable:
    n, margin, (_, gained) = answers.pairs.n, answers.margin, answers.rates

    def decides(loss: float, level: float, for_pass: bool) -> bool:
        return statistics.power.decision_power(n, gained + loss, gained, margin, level, for_pass) >= power

    return Detectable(
        fails_from=_edge(lambda loss: decides(loss, fail_level, for_pass=False), 1 - 2 * gained, margin),
        passes_up_to=_edge(lambda loss: decides(loss, pass_level, for_pass=True), 0.0, margin),
    )


def _edge(holds: Callable[[float], bool], inside: float, outside: float) -> float | None:
    """Return the value nearest to `outside` for which `holds`, to 1e-4; None where it does not hold `inside`."""
    if not holds(inside):
        return None
    while abs(outside - inside) > 1e-4:
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


@gate(
    Limits,
    {ACCURACY: Line("Right answers", "points that the policy gains or loses against FP16", per="workload")},
    rank=20,
    looks=True,
    pass_lasts=True,
    is_main=True,
    needed=_needed,
    detectable=_detectable,
)
def accuracy(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test each workload that has answers: for PASS at its own level, for FAIL at Holm's levels over workloads; then bins."""
    look, holm = evidence.look, statistics.paired.holm_levels
    workloads = _workloads(evidence, limits)
    bad = [one.inferiority for one in workloads]
    pass_level = look.pass_level(limits.pass_alpha)
    for one, p, fail_level in zip(workloads, bad, holm(bad, limits.alpha, look.fail_level), strict=True):
        if p <= fail_level:
            yield one.check("FAIL", fail_level)
        elif one.baseline < limits.min_baseline_accuracy:
            advice = (
                f"; the baseline is right too rarely to lose anything (gates.min_baseline_accuracy "
                f"{limits.min_baseline_accuracy:g}): ask what the model can do, or leave it out "
                f"(workloads.samples.{one.name}=0; of BFCL, workloads.bfcl.categories)"
            )
            yield one.check("INCONCLUSIVE", pass_level, advice)
        elif len(one.rows) < limits.min_samples:
            advice = f"; {len(one.rows)} samples, gates.min_samples is {limits.min_samples}"
            yield one.check("INCONCLUSIVE", pass_level, advice)
        else:
            passes = statistics.paired.noninferiority_p(one.pairs, one.margin) <= pass_level
            yield one.check("PASS" if passes else "INCONCLUSIVE", pass_level)
    bins = list(_bins(evidence, limits))
    bad = [one.inferiority for one in bins]
    for one, p, level in zip(bins, bad, holm(bad, limits.alpha, look.fail_level), strict=True):
        if p <= level:
            yield one.check("FAIL", level)


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
