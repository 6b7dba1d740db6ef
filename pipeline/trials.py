"""The gates one by one: each function returns lines of the verdict's table for `pipeline.gates.decide`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline import statistics as st
from pipeline.gates import Check, Gates, Status, finite
from pipeline.report import EvaluationReport, SampleRow

MEASURED = (
    "mean_kl",
    "max_kl",
    "baseline_nll",
    "candidate_nll",
    "top1_agreement",
    "top10_overlap",
    "mean_squared_delta_p",
)
MOST_SAMPLES = 1_000_000
"""A larger number of samples is not advice."""


def completeness(report: EvaluationReport, rows: Sequence[SampleRow]) -> list[Check]:
    """FAIL for what is missing, doubled or not a number."""
    problems: list[tuple[str, str]] = []
    if not rows:
        problems.append(("all", "all: no samples were evaluated"))
    if len(rows) != report.samples or len({row.id for row in rows}) != len(rows):
        problems.append(("all", f"all: the report counts {report.samples} samples, samples.jsonl has {len(rows)}"))
    for workload in sorted({row.workload for row in rows}):
        mine = [row for row in rows if row.workload == workload]
        broken = [row.id for row in mine if not _complete(row)]
        if broken:
            text = f"{workload}: {len(broken)} of {len(mine)} samples have no finite numbers or answer ({broken[0]})"
            problems.append((workload, text))
    return [
        Check(gate="complete", where=where, value=None, bound=None, threshold=None, status="FAIL", reason=reason)
        for where, reason in problems
    ]


def _complete(row: SampleRow) -> bool:
    values = [getattr(row, name) for name in MEASURED]
    measured = all(value is not None and math.isfinite(value) for value in values)
    answered = not row.judged or (row.baseline_correct is not None and row.candidate_correct is not None)
    return measured and answered and row.scored_tokens > 0 and row.non_finite_steps == 0


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
        relation = {"PASS": "above", "FAIL": "below", "INCONCLUSIVE": "not above"}[status]
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


@dataclass(frozen=True)
class _TripWire:
    gate: str
    label: str
    threshold: float
    value: float
    replicates: st.Array
    upper_is_bad: bool = True

    def status(self, alpha: float, passes_by_bound: bool) -> tuple[Status, float]:
        """The verdict and the bound that it rests on."""
        low, high = (float(np.quantile(self.replicates, q)) for q in (alpha, 1 - alpha))
        if not all(math.isfinite(v) for v in (self.value, low, high)):
            return "FAIL", math.nan
        best, worst = (low, high) if self.upper_is_bad else (high, low)
        if self._outside(best):
            return "FAIL", best
        if passes_by_bound and self._outside(worst):
            return "INCONCLUSIVE", worst
        return "PASS", worst if passes_by_bound else best

    def _outside(self, value: float) -> bool:
        return value > self.threshold if self.upper_is_bad else value < self.threshold

    def check(self, where: str, alpha: float, passes_by_bound: bool = True) -> Check:
        status, bound = self.status(alpha, passes_by_bound)
        limit = "at most" if self.upper_is_bad else "at least"
        judgement = {"PASS": "within", "FAIL": "outside", "INCONCLUSIVE": "not clearly within"}[status]
        text = (
            f"{where}: {self.label} {self.value:.4g}, {100 * (1 - alpha):.4g} % bound {bound:.4g}, "
            f"{judgement} {self.gate} ({limit} {self.threshold:g})"
        )
        return Check(
            gate=self.gate,
            where=where,
            value=finite(self.value),
            bound=finite(bound),
            threshold=self.threshold,
            status=status,
            reason=text,
        )


def _sums(rows: Sequence[SampleRow]) -> st.Array:
    """Per row: tokens, and sums over tokens of KL, overlap, squared delta p and NLL difference, shape (rows, 5)."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    per_token = [
        (
            1.0,
            number(row.mean_kl),
            number(row.top10_overlap),
            number(row.mean_squared_delta_p),
            number(row.candidate_nll) - number(row.baseline_nll),
        )
        for row in rows
    ]
    tokens = np.array([row.scored_tokens for row in rows], dtype=np.float64)
    return np.asarray(np.array(per_token) * tokens[:, None])


def _trip_wires(rows: Sequence[SampleRow], gates: Gates) -> Iterator[_TripWire]:
    sums = _sums(rows)
    resampled = st.resampled_sums(sums, [row.document for row in rows])
    tokens, kl, overlap, squared, nll = np.concatenate([sums.sum(axis=0, keepdims=True), resampled]).T
    with np.errstate(over="ignore"):  # an infinite ratio fails as not finite
        series = (
            ("max_mean_kl", "mean KL", gates.max_mean_kl, kl / tokens, True),
            ("min_top10_overlap", "top-10 overlap", gates.min_top10_overlap, overlap / tokens, False),
            ("max_ppl_ratio", "PPL ratio", gates.max_ppl_ratio, np.exp(nll / tokens), True),
            ("max_rms_delta_p", "RMS change of p", gates.max_rms_delta_p, np.sqrt(squared / tokens), True),
        )
    for gate, label, threshold, values, upper_is_bad in series:
        yield _TripWire(gate, label, threshold, float(values[0]), values[1:], upper_is_bad)


def fidelity(rows: Sequence[SampleRow], gates: Gates) -> list[Check]:
    """The trip-wires of every workload; with fewer than two documents nothing bounds the value, which never passes."""
    checks: list[Check] = []
    for workload in sorted({row.workload for row in rows}):
        mine = [row for row in rows if row.workload == workload]
        found = [wire.check(workload, gates.alpha) for wire in _trip_wires(mine, gates)]
        if len({row.document for row in mine}) < 2:
            reason = f"{workload}: one document says nothing about the spread; about 2 documents or more are needed"
            single = {"status": "INCONCLUSIVE", "bound": None, "reason": reason}
            found = [check if check.status == "FAIL" else check.model_copy(update=single) for check in found]
        checks += found
    return checks


def tail_and_slope(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> list[Check]:
    """p99.9 of the KL and its slope over context: FAIL when clearly outside, else PASS."""
    documents = [row.document for row in rows]
    tokens = np.array([row.scored_tokens for row in rows], dtype=np.float64)
    weights, index = st.document_weights(documents)
    tails = [row.kl_tail for row in rows]
    floor = report.overall.fidelity.kl_p99
    floor = math.nan if floor is None else floor
    counts = np.concatenate([np.ones((1, len(rows))), weights[:, index]])  # first the data, then the replicates
    values = st.tail_quantile(tails, counts, tokens, 0.001, floor)
    wires = [_TripWire("max_p999_kl", "99.9th percentile of KL", gates.max_p999_kl, float(values[0]), values[1:])]
    slope, slopes = kl_slope(rows)
    slopes = slopes[np.isfinite(slopes)]  # a replicate may have drawn one context length only
    if math.isfinite(slope) and len(slopes):
        wires.append(_TripWire("max_kl_slope", "growth of KL per 1k tokens", gates.max_kl_slope, slope, slopes))
    return [wire.check("all", gates.alpha, passes_by_bound=False) for wire in wires]


def kl_slope(rows: Sequence[SampleRow]) -> tuple[float, st.Array]:
    """Slope of the mean KL per 1,000 tokens of context within workloads, and its bootstrap by document."""
    return st.pooled_slope(
        np.array([row.context_tokens / 1000 for row in rows]),
        np.array([math.nan if row.mean_kl is None else row.mean_kl for row in rows]),
        np.array([row.scored_tokens for row in rows], dtype=np.float64),
        [row.workload for row in rows],
        [row.document for row in rows],
    )


def noise(report: EvaluationReport, gates: Gates) -> list[Check]:
    """INCONCLUSIVE where a KL threshold is not above what the baseline shows against itself, or where nobody looked."""
    floor = report.noise.fidelity
    if floor is None:
        reason = "all: no A/A noise floor was measured; set workloads.noise_samples to 1 or more"
        lines: list[tuple[str, float | None, float | None, str]] = [("noise_floor", None, None, reason)]
    else:
        pairs = (
            ("max_mean_kl", "mean KL", floor.kl_mean, gates.max_mean_kl),
            ("max_p999_kl", "99.9th percentile of KL", floor.kl_p999, gates.max_p999_kl),
        )
        lines = [
            (
                gate,
                value,
                limit,
                f"all: {gate}={limit:g} is finer than the baseline's own noise ({label} {_text(value)})",
            )
            for gate, label, value, limit in pairs
            if value is None or value >= limit
        ]
    return [
        Check(gate=g, where="A/A noise", value=v, bound=None, threshold=t, status="INCONCLUSIVE", reason=r)
        for g, v, t, r in lines
    ]


def _text(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def canary(report: EvaluationReport, gates: Gates) -> list[Check]:
    """FAIL unless these very gates would have failed the engine whose key scales were corrupted.

    A corrupted engine whose logits are no longer finite counts as noticed.
    """
    rows = report.canary.rows
    wires = list(_trip_wires(rows, gates)) if rows else []
    kl = wires[0].value if wires else math.nan
    noticed = any(wire.status(gates.alpha, passes_by_bound=True)[0] == "FAIL" for wire in wires)
    said = f"canary: with key scales x {report.canary.factor:g} the mean KL is {kl:.3g}"
    blind = ", and no gate noticed: the evaluation does not see the cache" if rows else "; it did not run"
    return [
        Check(
            gate="canary",
            where="canary",
            value=finite(kl),
            bound=None,
            threshold=gates.max_mean_kl,
            status="PASS" if noticed else "FAIL",
            reason=said + (", noticed" if noticed else blind),
        )
    ]
