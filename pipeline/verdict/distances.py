"""Gates on completeness, on distances between distributions, and on the evaluation itself (noise floor and canary).

Each function returns lines of the verdict's table for `pipeline.verdict.gates.decide`. The gates on answers are in
`pipeline.verdict.answers`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.verdict import statistics as st
from pipeline.verdict.looks import Look
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates, Status, finite

REQUIRED_NUMBERS = (
    "mean_kl",
    "max_kl",
    "baseline_nll",
    "candidate_nll",
    "top1_agreement",
    "top10_overlap",
    "mean_squared_delta_p",
)
"""Fields of a row that must be finite."""

MISSED_SHARE = 0.01
"""Most of the threshold of the mean KL that compact storage may miss."""


def completeness(report: EvaluationReport, rows: Sequence[SampleRow]) -> list[Check]:
    """Return FAIL lines for samples that are missing, doubled, or lack a finite number, or are of no planned round."""
    problems: list[tuple[str, str]] = []
    if not rows:
        problems.append(("all", "all: no samples were evaluated"))
    if len(rows) != report.samples or len({row.id for row in rows}) != len(rows):
        problems.append(("all", f"all: the report counts {report.samples} samples, samples.jsonl has {len(rows)}"))
    unplanned = sorted({row.round for row in rows} - set(range(1, len(report.planned_rounds) + 1)))
    if unplanned:
        problems.append(("all", f"all: samples are of round {unplanned[0]}, {len(report.planned_rounds)} were planned"))
    for workload in sorted({row.workload for row in rows}):
        of_workload = [row for row in rows if row.workload == workload]
        broken = [row.id for row in of_workload if not _is_complete(row)]
        if broken:
            text = f"{workload}: {len(broken)} of {len(of_workload)} samples have no finite numbers or answer ({broken[0]})"
            problems.append((workload, text))
    return [
        Check(gate="complete", where=where, value=None, bound=None, threshold=None, status="FAIL", reason=reason)
        for where, reason in problems
    ]


def _is_complete(row: SampleRow) -> bool:
    values = [getattr(row, name) for name in REQUIRED_NUMBERS]
    measured = all(value is not None and math.isfinite(value) for value in values)
    answered = not row.judged or (row.baseline_correct is not None and row.candidate_correct is not None)
    return measured and answered and row.scored_tokens > 0 and row.non_finite_steps == 0


def not_asked_yet(report: EvaluationReport, rows: Sequence[SampleRow]) -> list[Check]:
    """Return INCONCLUSIVE lines for planned workloads of which nothing was run yet: few documents may be in later rounds."""
    asked = {row.workload for row in rows}
    judged = {row.workload for row in rows if row.judged}
    missing = [name for name, answered in report.planned_workloads.items() if name not in (judged if answered else asked)]
    return [
        Check(
            gate="planned_workloads",
            where=name,
            value=0,
            bound=None,
            threshold=None,
            status="INCONCLUSIVE",
            reason=f"{name}: no sample of it was run yet; a later round has them",
        )
        for name in sorted(missing)
    ]


def documents_without_answers(rows: Sequence[SampleRow], gates: Gates) -> list[Check]:
    """Decide whether distances may decide alone where no sample has an answer: with gates.min_samples documents or more.

    Documents are counted, because samples of one document are alike, and those of all workloads together, because the whole
    report must show enough (few prose samples beside judged ones are fine). There is no line where any answer is judged,
    because accuracy is the verdict then.
    """
    if any(row.judged for row in rows):
        return []
    documents = len({row.document for row in rows})
    enough = documents >= gates.min_samples
    count = f"all: no sample has an answer to judge, {documents} documents have distances"
    return [
        Check(
            gate="min_samples",
            where="all",
            value=documents,
            bound=None,
            threshold=gates.min_samples,
            status="PASS" if enough else "INCONCLUSIVE",
            reason=f"{count}; gates.min_samples is {gates.min_samples}",
        )
    ]


@dataclass(frozen=True)
class _TripWire:
    """A value with its threshold, and its bootstrap."""

    gate: str
    label: str
    threshold: float
    value: float
    replicates: st.Array
    """The value in each bootstrap replicate, shape (replicates,)."""
    upper_is_bad: bool = True

    def status(self, fail_level: float, pass_level: float | None) -> tuple[Status, float, float]:
        """Return the status, the bound that decided it, and the bound's level.

        A value fails when it is clearly outside. It passes when it is clearly within; without `pass_level`, when it did not
        fail. A level finer than one replicate gives the most extreme replicate.
        """
        best = self._quantile(fail_level)
        worst = self._quantile(1 - (fail_level if pass_level is None else pass_level))
        if not all(math.isfinite(v) for v in (self.value, best, worst)):
            return "FAIL", math.nan, fail_level
        if self._is_outside(best):
            return "FAIL", best, fail_level
        if pass_level is None:
            return "PASS", best, fail_level
        return "INCONCLUSIVE" if self._is_outside(worst) else "PASS", worst, pass_level

    def _quantile(self, share: float) -> float:
        """The value at least as bad as `share` of the replicates."""
        return float(np.quantile(self.replicates, share if self.upper_is_bad else 1 - share))

    def _is_outside(self, value: float) -> bool:
        return value > self.threshold if self.upper_is_bad else value < self.threshold

    def check(self, where: str, fail_level: float, pass_level: float | None) -> Check:
        status, bound, level = self.status(fail_level, pass_level)
        limit = "at most" if self.upper_is_bad else "at least"
        judgement = {"PASS": "within", "FAIL": "outside", "INCONCLUSIVE": "not clearly within"}[status]
        text = (
            f"{where}: {self.label} {self.value:.4g}, {100 * (1 - level):.4g} % bound {bound:.4g}, "
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
    """Return per row the tokens, and the sums over tokens of KL, overlap, squared delta p and NLL difference: (rows, 5)."""

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
    with np.errstate(over="ignore"):  # `_TripWire.status` fails an infinite ratio
        series = (
            ("max_mean_kl", "mean KL", gates.max_mean_kl, kl / tokens, True),
            ("min_top10_overlap", "top-10 overlap", gates.min_top10_overlap, overlap / tokens, False),
            ("max_ppl_ratio", "PPL ratio", gates.max_ppl_ratio, np.exp(nll / tokens), True),
            ("max_rms_delta_p", "RMS change of p", gates.max_rms_delta_p, np.sqrt(squared / tokens), True),
        )
    for gate, label, threshold, values, upper_is_bad in series:
        yield _TripWire(gate, label, threshold, float(values[0]), values[1:], upper_is_bad)


def distance_by_workload(rows: Sequence[SampleRow], gates: Gates, look: Look) -> list[Check]:
    """Return the trip-wires of every workload.

    With fewer than two documents nothing bounds a value, so that none passes. The bootstrap of a few documents is too sure of
    itself (of three, the lowest is its lower bound at any level), so that a look before the last takes ten to decide anything.
    """
    checks: list[Check] = []
    levels = look.fail_level(gates.alpha), look.pass_level(gates.alpha)
    for workload in sorted({row.workload for row in rows}):
        of_workload = [row for row in rows if row.workload == workload]
        workload_checks = [wire.check(workload, *levels) for wire in _trip_wires(of_workload, gates)]
        documents = len({row.document for row in of_workload})
        if not look.is_last and documents < st.FEW_DOCUMENTS:
            reason = f"{workload}: {documents} documents; a look before the last takes {st.FEW_DOCUMENTS} to bound a distance"
            undecided = {"status": "INCONCLUSIVE", "bound": None, "reason": reason}
            workload_checks = [check.model_copy(update=undecided) for check in workload_checks]
        elif levels[1] * st.REPLICATES < 1:
            reason = f"{workload}: {st.REPLICATES} replicates cannot show a distance within its threshold at this look's level"
            undecided = {"status": "INCONCLUSIVE", "bound": None, "reason": reason}
            workload_checks = [
                check.model_copy(update=undecided) if check.status == "PASS" else check for check in workload_checks
            ]
        elif documents < 2:
            reason = f"{workload}: one document says nothing about the spread; about 2 documents or more are needed"
            undecided = {"status": "INCONCLUSIVE", "bound": None, "reason": reason}
            workload_checks = [
                check if check.status == "FAIL" else check.model_copy(update=undecided) for check in workload_checks
            ]
        checks += workload_checks
    return checks


def tail_and_slope(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates, look: Look) -> list[Check]:
    """Check p99.9 of the KL and, with `min_samples` documents, its slope over context: FAIL when clearly outside, else PASS.

    There are no lines at a look before the last at fewer than ten documents, as for the other distances.
    """
    documents = [row.document for row in rows]
    if not look.is_last and len(set(documents)) < st.FEW_DOCUMENTS:
        return []
    tokens = np.array([row.scored_tokens for row in rows], dtype=np.float64)
    weights, index = st.document_weights(documents)
    tails = [row.kl_tail for row in rows]
    floor = report.overall.fidelity.kl_p99
    floor = math.nan if floor is None else floor
    counts = np.concatenate([np.ones((1, len(rows))), weights[:, index]])  # row 0 is the data, the others are the replicates
    values = st.tail_quantile(tails, counts, tokens, 0.001, floor)
    wires = [_TripWire("max_p999_kl", "99.9th percentile of KL", gates.max_p999_kl, float(values[0]), values[1:])]
    slope, slopes = kl_slope(rows)
    slopes = slopes[np.isfinite(slopes)]  # a replicate may have drawn one context length only
    # With a few documents every replicate draws nearly the same line, so that the bound would look certain.
    if math.isfinite(slope) and len(slopes) and len(set(documents)) >= gates.min_samples:
        wires.append(_TripWire("max_kl_slope", "growth of KL per 1k tokens", gates.max_kl_slope, slope, slopes))
    return [wire.check("all", look.fail_level(gates.alpha), pass_level=None) for wire in wires]


def kl_slope(rows: Sequence[SampleRow]) -> tuple[float, st.Array]:
    """Return the slope of the mean KL per 1,000 tokens of context within workloads, and its bootstrap by document."""
    return st.pooled_slope(
        np.array([row.context_tokens / 1000 for row in rows]),
        np.array([math.nan if row.mean_kl is None else row.mean_kl for row in rows]),
        np.array([row.scored_tokens for row in rows], dtype=np.float64),
        [row.workload for row in rows],
        [row.document for row in rows],
    )


def noise_floor(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Return INCONCLUSIVE lines where a KL threshold is not above the baseline's KL to itself, or where that is unknown."""
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
                f"all: {gate}={limit:g} is finer than the baseline's own noise ({label} {_rounded(value)})",
            )
            for gate, label, value, limit in pairs
            if value is None or value >= limit
        ]
    return [
        Check(gate=g, where="A/A noise", value=v, bound=None, threshold=t, status="INCONCLUSIVE", reason=r)
        for g, v, t, r in lines
    ]


def compaction(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Return an INCONCLUSIVE line where the stored heads of the baseline's distributions miss a share of the KL that matters.

    Reports whose baseline was stored whole have none.
    """
    record = report.compaction
    if record is None:
        return []
    limit = MISSED_SHARE * gates.max_mean_kl
    if record.difference is not None and record.difference <= limit:
        return []
    reason = (
        f"all: the stored heads of the baseline's distributions miss {_rounded(record.difference)} nats of the mean KL, "
        f"more than {MISSED_SHARE:.0%} of max_mean_kl={gates.max_mean_kl:g} (measured on {record.tokens} tokens)"
    )
    value = finite(record.difference)
    return [
        Check(gate="compaction", where="all", value=value, bound=None, threshold=limit, status="INCONCLUSIVE", reason=reason)
    ]


def _rounded(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def canary(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Return FAIL unless the same gates would have failed the engine whose key scales were corrupted.

    A corrupted engine whose logits are not finite counts as noticed.
    """
    rows = report.canary.rows
    wires = list(_trip_wires(rows, gates)) if rows else []
    kl = wires[0].value if wires else math.nan
    noticed = any(wire.status(gates.alpha, gates.alpha)[0] == "FAIL" for wire in wires)
    measured = f"canary: with key scales x {report.canary.factor:g} the mean KL is {kl:.3g}"
    unnoticed = ", and no gate noticed: the evaluation does not see the cache" if rows else "; it did not run"
    return [
        Check(
            gate="canary",
            where="canary",
            value=finite(kl),
            bound=None,
            threshold=gates.max_mean_kl,
            status="PASS" if noticed else "FAIL",
            reason=measured + (", noticed" if noticed else unnoticed),
        )
    ]
