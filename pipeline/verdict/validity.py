"""Gates on the evaluation itself: completeness, what was asked so far, the noise floor, compact storage, delivered scales, what
servers did not show.

Each function returns lines of the verdict's table for `pipeline.verdict.gates.decide`; they are of the report as it stands, so
that looking at them again costs nothing.
"""

import math
from collections.abc import Collection, Sequence

from pipeline.verdict.delivery import ScaleChange, Served, describe_changes
from pipeline.verdict.record import finite
from pipeline.verdict.report import EvaluationReport, NoiseFloor, SampleRow
from pipeline.verdict.thresholds import Check, Gates, LineStatus, ScaleChangeKind

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

REUSE = "reuse"
"""The line on what a server did not show."""

OF_LOWER_BOUNDS = ("max_mean_kl", "max_ruined_share", "max_p999_kl", "max_kl_slope")
"""Gates on the KL, of which a server shows a lower bound."""

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


def noise_floor(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Return INCONCLUSIVE lines where a KL threshold is not above an engine's KL to itself, or where that is unknown."""
    return _noise_of("baseline", report.noise, gates) + (
        _noise_of("candidate", report.candidate_noise, gates) if report.candidate_noise is not None else []
    )


def _noise_of(engine: str, noise: NoiseFloor, gates: Gates) -> list[Check]:
    floor = noise.fidelity
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
                f"all: {gate}={limit:g} is finer than the {engine}'s own noise ({label} {_rounded(value)})",
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


def delivered_scales(changes: Sequence[ScaleChange] | None, allowed: Collection[ScaleChangeKind]) -> list[Check]:
    """Return the gate's line: FAIL where a scale arrived as something else, a WARNING where that is allowed.

    Args:
        changes: What differs; None for an engine that loads no scales by itself.
        allowed: The kinds that `gates.allow_scale_changes` accepts.
    """
    if changes is None:
        return []
    refused = [change for change in changes if change.kind not in allowed]
    status: LineStatus = "FAIL" if refused else "WARNING" if changes else "PASS"
    reason = describe_changes(refused or changes) or "the engine uses the scales that its checkpoint carries"
    if changes and not refused:
        reason += ", as gates.allow_scale_changes accepts"
    return [
        Check(
            gate="scale_delivery",
            where="candidate",
            value=float(len(changes)),
            bound=None,
            threshold=0.0,
            status=status,
            reason=f"candidate: scales: {reason}",
        )
    ]


def reuse(served: Served | None) -> list[Check]:
    """Return the line that keeps a server from passing: what was seen of it is no decoding. Engines that run here have none."""
    if served is None:
        return []
    reason = f"candidate: only reuse over a prefix cache was seen, the decode kernel was not: {served.seen}"
    mass = served.candidate.shown_mass
    return [Check(gate=REUSE, where="candidate", value=mass, bound=None, threshold=None, status="INCONCLUSIVE", reason=reason)]


def of_lower_bounds(checks: Sequence[Check], served: Served | None) -> list[Check]:
    """Return lines in which a lower bound of a server's KL passes nothing; above a limit it fails as any other."""
    if served is None:
        return list(checks)
    return [
        check.model_copy(update={"status": "WARNING", "reason": f"{check.reason}, of a lower bound, which shows no PASS"})
        if check.gate in OF_LOWER_BOUNDS and check.status == "PASS"
        else check
        for check in checks
    ]
