"""Gates on answers: paired non-inferiority per workload, and context bins that are clearly worse."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.verdict import statistics as st
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates, Status

MOST_SAMPLES = 1_000_000
"""A larger number of samples is not advice."""


@dataclass(frozen=True)
class _Class:
    """The paired answers of one workload, or of one context bin of it."""

    name: str
    workload: str
    pairs: st.Pairs
    judged: int
    lost: int
    gained: int
    baseline: float
    candidate: float

    @classmethod
    def of(cls, name: str, rows: Sequence[SampleRow]) -> "_Class":
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

    def describe(self) -> str:
        return (
            f"{self.name}: {self.lost} of {self.judged} answers lost, {self.gained} gained; "
            f"accuracy {self.candidate:.3f} vs {self.baseline:.3f}"
        )

    def check(self, status: Status, alpha: float, lower: bool, margin: float, advice: str = "") -> Check:
        bound = st.difference_bound(self.pairs, alpha, lower)
        side = "lower" if lower else "upper"
        relation = "below" if status == "FAIL" else "above" if bound > -margin else "not above"
        level = f"{100 * (1 - alpha):.4g} %"
        text = f"{self.describe()}, {side} {level} bound {bound:+.3f} {relation} the margin {-margin:+.3f}{advice}"
        return Check(
            gate="accuracy",
            where=self.name,
            value=self.candidate - self.baseline,
            bound=bound,
            threshold=-margin,
            status=status,
            reason=text,
        )


def accuracy(rows: Sequence[SampleRow], gates: Gates) -> tuple[list[Check], dict[str, int]]:
    """Paired non-inferiority per workload that has answers, Holm over workloads in both directions."""
    workloads = sorted({row.workload for row in rows if row.judged})
    classes = [_Class.of(name, [r for r in rows if r.judged and r.workload == name]) for name in workloads]
    margins = [gates.margin_of(name) for name in workloads]
    good = [st.noninferiority_p(c.pairs, m) for c, m in zip(classes, margins, strict=True)]
    bad = [st.inferiority_p(c.pairs, m) for c, m in zip(classes, margins, strict=True)]
    good_levels, bad_levels = st.holm_levels(good, gates.alpha), st.holm_levels(bad, gates.alpha)
    checks: list[Check] = []
    needed: dict[str, int] = {}
    for i, (one, margin) in enumerate(zip(classes, margins, strict=True)):
        # a workload that Holm's procedure did not reach is described at its strictest level
        level = good_levels[i] or gates.alpha / len(classes)
        if bad[i] <= bad_levels[i]:
            checks.append(one.check("FAIL", bad_levels[i], lower=False, margin=margin))
        elif one.baseline < gates.min_baseline_accuracy:
            advice = (
                f"; the baseline is right too rarely to lose anything (gates.min_baseline_accuracy "
                f"{gates.min_baseline_accuracy:g}): ask what the model can do, or leave it out (workloads.samples.{one.name}=0)"
            )
            checks.append(one.check("INCONCLUSIVE", level, lower=True, margin=margin, advice=advice))
        elif one.judged < gates.min_samples:
            needed[one.name] = max(gates.min_samples, _needed(one.pairs, margin, level, gates))
            advice = f"; {one.judged} samples, gates.min_samples is {gates.min_samples}"
            checks.append(one.check("INCONCLUSIVE", level, lower=True, margin=margin, advice=advice))
        elif good[i] <= good_levels[i]:
            checks.append(one.check("PASS", level, lower=True, margin=margin))
        else:
            needed[one.name] = _needed(one.pairs, margin, level, gates)
            amount = f"{needed[one.name]:,}" if needed[one.name] < MOST_SAMPLES else "over a million"
            advice = f"; about {amount} samples would decide"
            checks.append(one.check("INCONCLUSIVE", level, lower=True, margin=margin, advice=advice))
    return checks, needed


def _needed(pairs: st.Pairs, margin: float, alpha: float, gates: Gates) -> int:
    """Samples in all that decide at the observed rates, never fewer than one more and than zero flips would need."""
    flips = (pairs.lost + pairs.gained) / pairs.n
    least = max(pairs.n + 1, st.samples_without_flips(margin, alpha))
    if abs(margin + pairs.difference) < 1e-9:
        return MOST_SAMPLES
    wanted = st.paired_samples(flips, margin, alpha, gates.power, pairs.difference)
    return min(MOST_SAMPLES, max(least, wanted))


def accuracy_by_bin(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> list[Check]:
    """FAIL lines of context bins that are clearly worse, Holm over bins; a bin is too small to be asked for a PASS."""
    classes: list[_Class] = []
    for part in report.slices:
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        mine = [row for row in rows if row.judged and row.workload == part.workload]
        inside = [row for row in mine if low <= row.context_tokens and (high is None or row.context_tokens < high)]
        if inside and len(inside) < len(mine):  # else the bin is the workload, which was judged already
            classes.append(_Class.of(f"{part.workload} [{low}, {'' if high is None else high})", inside))
    p_values = [st.inferiority_p(one.pairs, gates.margin_of(one.workload)) for one in classes]
    levels = st.holm_levels(p_values, gates.alpha)
    return [
        one.check("FAIL", level, lower=False, margin=gates.margin_of(one.workload))
        for one, p, level in zip(classes, p_values, levels, strict=True)
        if p <= level
    ]
