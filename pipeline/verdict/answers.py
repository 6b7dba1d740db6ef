"""Gates on answers: paired non-inferiority per workload, a search for context bins that are clearly worse, and what speculative
decoding makes of the answers."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from pipeline.statistics import bounds, power
from pipeline.statistics import paired as st
from pipeline.statistics.looks import Look
from pipeline.verdict.distances import OUTLIER, Distance
from pipeline.verdict.report import Acceptance, EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Detectable, Gates, Status

MOST_SAMPLES = 1_000_000
"""Cap of the number of samples that an INCONCLUSIVE asks for; texts say "over a million" there."""


@dataclass(frozen=True)
class _PairedAnswers:
    """The paired answers of one workload, or of one context bin of it."""

    name: str
    """The workload, or `workload [low, high)`."""
    workload: str
    pairs: st.Pairs
    """Counts for the tests, smaller than those below where samples share documents."""
    judged: int
    lost: int
    """Right in the baseline, wrong in the candidate."""
    gained: int
    """Wrong in the baseline, right in the candidate."""
    baseline: float
    """Accuracy of the baseline, 0 to 1."""
    candidate: float
    """Accuracy of the candidate, 0 to 1."""

    @classmethod
    def of(cls, name: str, rows: Sequence[SampleRow]) -> "_PairedAnswers":
        """Count the answers of `rows`, which are judged samples of one workload."""
        before = [bool(row.baseline_correct) for row in rows]
        after = [bool(row.candidate_correct) for row in rows]
        differences = [int(a) - int(b) for a, b in zip(after, before, strict=True)]
        return cls(
            name=name,
            workload=rows[0].workload,
            pairs=st.effective_pairs(differences, [row.document for row in rows]),
            judged=len(rows),
            lost=differences.count(-1),
            gained=differences.count(1),
            baseline=sum(before) / len(rows),
            candidate=sum(after) / len(rows),
        )

    def description(self) -> str:
        return (
            f"{self.name}: {self.lost} of {self.judged} answers lost, {self.gained} gained; "
            f"accuracy {self.candidate:.3f} vs {self.baseline:.3f}"
        )

    def check(self, status: Status, alpha: float, lower: bool, margin: float, advice: str = "") -> Check:
        bound = st.difference_bound(self.pairs, alpha, lower)
        side = "lower" if lower else "upper"
        relation = "below" if status == "FAIL" else "above" if bound > -margin else "not above"
        level = f"{100 * (1 - alpha):.4g} %"
        text = f"{self.description()}, {side} {level} bound {bound:+.3f} {relation} the margin {-margin:+.3f}{advice}"
        return Check(
            gate="accuracy",
            where=self.name,
            value=self.candidate - self.baseline,
            bound=bound,
            threshold=-margin,
            status=status,
            reason=text,
        )


def _groups(rows: Sequence[SampleRow]) -> list[_PairedAnswers]:
    workloads = sorted({row.workload for row in rows if row.judged})
    return [_PairedAnswers.of(name, [r for r in rows if r.judged and r.workload == name]) for name in workloads]


def accuracy(rows: Sequence[SampleRow], gates: Gates, look: Look) -> list[Check]:
    """Test each workload that has answers at one look: for PASS at its own level, for FAIL at Holm's levels over workloads."""
    groups = _groups(rows)
    margins = [gates.margin_of(group.name) for group in groups]
    bad = [st.inferiority_p(c.pairs, m) for c, m in zip(groups, margins, strict=True)]
    fail_levels = st.holm_levels(bad, gates.alpha, look.fail_level)
    pass_level = look.pass_level(gates.pass_alpha)
    checks: list[Check] = []
    for group, margin, bad_p, fail_level in zip(groups, margins, bad, fail_levels, strict=True):
        if bad_p <= fail_level:
            checks.append(group.check("FAIL", fail_level, lower=False, margin=margin))
        elif group.baseline < gates.min_baseline_accuracy:
            advice = (
                f"; the baseline is right too rarely to lose anything (gates.min_baseline_accuracy "
                f"{gates.min_baseline_accuracy:g}): ask what the model can do, or leave it out "
                f"(workloads.samples.{group.name}=0; of BFCL, workloads.bfcl.categories)"
            )
            checks.append(group.check("INCONCLUSIVE", pass_level, lower=True, margin=margin, advice=advice))
        elif group.judged < gates.min_samples:
            advice = f"; {group.judged} samples, gates.min_samples is {gates.min_samples}"
            checks.append(group.check("INCONCLUSIVE", pass_level, lower=True, margin=margin, advice=advice))
        elif st.noninferiority_p(group.pairs, margin) <= pass_level:
            checks.append(group.check("PASS", pass_level, lower=True, margin=margin))
        else:
            checks.append(group.check("INCONCLUSIVE", pass_level, lower=True, margin=margin))
    return checks


def samples_needed(rows: Sequence[SampleRow], open_workloads: Collection[str], gates: Gates, look: Look) -> dict[str, int]:
    """Return with how many samples another evaluation would decide: for each workload whose answers are open, and for the
    others where they need more samples than they had, because the next attempt errs with less.

    A workload that the baseline rarely gets right has none: more of the same samples would not help.
    """
    every = _groups(rows)
    groups = [group for group in every if group.baseline >= gates.min_baseline_accuracy]
    if not any(group.name in open_workloads for group in groups):
        return {}
    needed = {group: max(gates.min_samples, _needed(group, look, gates, len(every))) for group in groups}
    return {group.name: count for group, count in needed.items() if group.name in open_workloads or count > group.judged}


def advice(count: int, gates: Gates) -> str:
    """Say that so many samples would decide a workload, for the end of a reason."""
    amount = f"{count:,}" if count < MOST_SAMPLES else "over a million"
    return f"; about {amount} samples would decide with gates.attempt={gates.next_attempt.attempt}"


def _needed(group: _PairedAnswers, look: Look, gates: Gates, workloads: int) -> int:
    """Return the samples with which the next evaluation would decide with `gates.power`, if the rates stay the same.

    The power is that of the test that decides at the last look of the same plan, at the level that the next attempt has there;
    earlier looks only add to it. It is at least the number with which a candidate without flips passes. Where samples share
    documents it grows in proportion, because what was counted is what independent samples would have shown.
    """
    pairs, margin = group.pairs, gates.margin_of(group.name)
    if abs(margin + pairs.difference) < 1e-9:
        return MOST_SAMPLES
    last = replace(look, number=len(look.shares))
    again = gates.next_attempt
    level = last.pass_level(again.pass_alpha) if pairs.difference > -margin else last.fail_level(gates.alpha / workloads)
    lost, gained = pairs.lost / pairs.n, pairs.gained / pairs.n
    enough = power.samples_to_decide(lost, gained, margin, level, gates.power, MOST_SAMPLES)
    return min(MOST_SAMPLES, max(group.judged + 1, math.ceil(enough * group.judged / pairs.n)))


def detectable(rows: Sequence[SampleRow], gates: Gates, look: Look) -> dict[str, Detectable]:
    """Return what the last look of this plan could tell of each workload, at as many samples as `rows` have of it.

    Answers that the candidate gains are as many as were seen.
    """
    last = replace(look, number=len(look.shares))
    groups = _groups(rows)
    fail_level, pass_level = last.fail_level(gates.alpha / max(len(groups), 1)), last.pass_level(gates.pass_alpha)
    return {group.name: _detectable(group, gates, fail_level, pass_level) for group in groups}


def _detectable(group: _PairedAnswers, gates: Gates, fail_level: float, pass_level: float) -> Detectable:
    margin, n, gained = gates.margin_of(group.name), group.pairs.n, group.pairs.gained / group.pairs.n

    def decides(loss: float, level: float, for_pass: bool) -> bool:
        return power.decision_power(n, gained + loss, gained, margin, level, for_pass) >= gates.power

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


def accuracy_by_context(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates, look: Look) -> list[Check]:
    """Return FAIL lines of context bins that are clearly worse at one look, with Holm's procedure over bins.

    A bin without such a line is not said to pass: bins are too small for that.
    """
    bins: list[_PairedAnswers] = []
    for part in report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        of_workload = [row for row in rows if row.judged and row.workload == part.workload]
        inside = [row for row in of_workload if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(of_workload):  # else the bin is the whole workload, which `accuracy` judges
            bins.append(_PairedAnswers.of(part.place, inside))
    p_values = [st.inferiority_p(group.pairs, gates.margin_of(group.workload)) for group in bins]
    levels = st.holm_levels(p_values, gates.alpha, look.fail_level)
    return [
        group.check("FAIL", level, lower=False, margin=gates.margin_of(group.workload))
        for group, p, level in zip(bins, p_values, levels, strict=True)
        if p <= level
    ]


def acceptance(drafters: Sequence[str], rows: Sequence[SampleRow], gates: Gates, lines: int) -> list[Check]:
    """Test the loss of acceptance length of every drafter and workload, answer by answer, the same at every look.

    An answer's loss is the log of the baseline's tokens a pass over the candidate's, so that answers which gain by chance make
    up for those that lose.

    Args:
        drafters: Those that the answers were drafted with.
        rows: The samples at one look.
        gates: The thresholds.
        lines: Distances that are tested together, which share `alpha` for a FAIL.

    Returns:
        A line for each workload that has answers; FAIL where one of them was not drafted. Without any answers a WARNING.
    """
    judged = [row for row in rows if row.judged]
    limit = -math.log1p(-gates.max_acceptance_loss)
    checks = []
    for drafter in drafters:
        for workload in sorted({row.workload for row in judged}):
            of_workload = [row for row in judged if row.workload == workload]
            losses = [_log_loss(row.acceptance.get(drafter)) for row in of_workload]
            documents = [row.document for row in of_workload]
            distance = Distance(
                gate="max_acceptance_loss",
                label="loss of acceptance length",
                threshold=gates.max_acceptance_loss,
                values=bounds.by_document(losses, [1.0] * len(losses), documents),
                limit=limit,
                best=-OUTLIER * limit,
                shown=lambda mean: -math.expm1(-mean),
            )
            checks.append(distance.check(f"{workload}, drafts by {drafter}", gates.alpha / lines, gates.pass_alpha))
    return checks if judged else [_not_drafted(drafter, gates) for drafter in drafters]


def _log_loss(counts: Acceptance | None) -> float:
    if counts is None:
        return math.nan
    baseline, candidate = counts.lengths
    return math.log(baseline / candidate)


def _not_drafted(drafter: str, gates: Gates) -> Check:
    return Check(
        gate="max_acceptance_loss",
        where=f"all, drafts by {drafter}",
        value=None,
        bound=None,
        threshold=gates.max_acceptance_loss,
        status="WARNING",
        reason=f"all: the acceptance length of drafts by {drafter} was not measured: no sample has an answer",
    )
