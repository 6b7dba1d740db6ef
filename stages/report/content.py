"""What a page shows, in the order in which it shows it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, Slice
from pipeline.verdict.thresholds import Status
from stages.report import curves, matrix
from stages.report.answers import ROOM, Answers, changed_answers
from stages.report.charts import specifications
from stages.report.curves import MEASURES
from stages.report.exhibit import Exhibit, Occasion
from stages.report.text import number, quantity
from stages.report.vega import Spec

MOST_POLICIES = 16
"""Policies that are shown in full; those beyond have their row of the overview."""

MIBI = 2**20


@dataclass(frozen=True)
class Row:
    """A row of the overview: what an engine costs and what it loses."""

    name: str
    verdict: Status | None
    """None for a baseline."""
    champion: bool
    note: str
    """Why it serves, or does not."""
    cells: tuple[str, ...]
    policy: int | None
    """Its index where it is shown in full."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a workload."""

    workload: str
    samples: int
    documents: int
    judged: str
    baseline: str
    """Accuracy of the baseline."""
    tells: str
    """What so many samples can tell."""
    needed: str


@dataclass(frozen=True)
class Engine:
    """Of which engine a verdict is, and how it can be had again."""

    name: str
    backend: str
    digests: tuple[tuple[str, str], ...]
    other: tuple[tuple[str, str], ...]
    """Libraries and the machine, by name."""
    settings: tuple[tuple[str, str], ...]
    verify: str | None
    warnings: tuple[str, ...]
    problem: str | None


@dataclass(frozen=True)
class Page:
    """All of it."""

    occasion: Occasion
    written: str
    lead: str
    rows: list[Row]
    headings: list[str]
    policies: list[Candidate]
    """Those that are shown in full."""
    workloads: list[str]
    gates: list[matrix.Gate]
    bins: list[matrix.BinLine]
    charts: dict[str, Spec]
    numbers: dict[str, list[tuple[str, ...]]]
    """Those of each chart by its name, as rows of a table: policy, workload, and what it draws."""
    measures: dict[str, str]
    samples: str
    """How many samples are drawn as dots."""
    answers: Answers
    timed: list[tuple[str, ...]]
    load: str
    asked: list[Asked]
    engines: list[Engine]


OVERVIEW: tuple[tuple[str, str, str, str], ...] = (
    ("KiB/token", "memory/kib_per_token", "baseline/kib_per_token", ".3f"),
    ("PPL ratio", "quality/ppl_ratio", "1", ".4f"),
    ("mean KL", "quality/kl_mean", "0", ""),
    ("top-10 overlap", "quality/top10_overlap", "1", ".3f"),
    ("right answers", "quality/accuracy_candidate", "quality/accuracy_baseline", ".3f"),
    ("lost", "quality/accuracy_lost", "", ".0f"),
    ("gained", "quality/accuracy_gained", "", ".0f"),
    ("samples", "quality/samples", "", ".0f"),
    ("decode tokens/s", "perf/decode_tokens_per_s", "baseline/decode_tokens_per_s", ",.0f"),
)
"""Heading, the candidate's metric, the baseline's metric (or its value by definition), format; without one, of any size."""


def make_page(exhibits: Sequence[Exhibit], occasion: Occasion, room: int = ROOM) -> Page:
    """Return what the page shows.

    Args:
        exhibits: The candidates, in the order of the summary.
        occasion: The command.
        room: Characters of HTML that answers may take up.
    """
    full = sorted(exhibits, key=lambda e: (e.candidate.name != occasion.champion, e.candidate.verdict != "PASS"))[
        :MOST_POLICIES
    ]
    full = [exhibit for exhibit in exhibits if exhibit in full]
    workloads = list(dict.fromkeys(row.workload for exhibit in full for row in exhibit.rows))
    data = curves.Curves.of(full)
    systems = curves.systems(full)
    return Page(
        occasion=occasion,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        lead=_lead([exhibit.candidate for exhibit in exhibits]),
        rows=list(_overview(exhibits, full, occasion)),
        headings=[heading for heading, *_ in OVERVIEW],
        policies=[exhibit.candidate for exhibit in full],
        workloads=workloads,
        gates=matrix.gates(full, workloads),
        bins=matrix.bins(full),
        charts=specifications(data, [exhibit.candidate.name for exhibit in full]),
        numbers=_numbers(data),
        measures={measure: title for measure, (title, _) in MEASURES.items()},
        samples=f"{len(data.dots):,} of {data.rows:,} samples" if len(data.dots) < data.rows else f"{data.rows:,} samples",
        answers=changed_answers(full, room),
        timed=[_timed(name, system) for name, system in systems],
        load=_load(systems),
        asked=list(_asked(full)),
        engines=[_engine(exhibit) for exhibit in full],
    )


def _lead(candidates: Sequence[Candidate]) -> str:
    counts = {status: sum(c.verdict == status for c in candidates) for status in ("PASS", "INCONCLUSIVE", "FAIL")}
    words = {"PASS": "held up", "INCONCLUSIVE": "not decided", "FAIL": "failed"}
    told = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    noun = "KV cache" if len(candidates) == 1 else "KV caches"
    return f"{len(candidates)} {noun} judged against FP16 on the decode path: {told}."


def _overview(exhibits: Sequence[Exhibit], full: Sequence[Exhibit], occasion: Occasion) -> Iterator[Row]:
    baselines = {exhibit.candidate.baseline.digest: exhibit.candidate for exhibit in reversed(exhibits)}
    for judged in reversed(baselines.values()):
        name = curves.BASELINE if len(baselines) == 1 else f"{curves.BASELINE} of {judged.name}"
        cells = (_figure(judged, metric, form) if "/" in metric else metric for _, _, metric, form in OVERVIEW)
        yield Row(name, None, False, "", tuple(cells), None)
    for exhibit in exhibits:
        candidate = exhibit.candidate
        champion = candidate.name == occasion.champion
        note = occasion.passed_over.get(candidate.name, "")
        if not note:
            note = candidate.reasons[0] if candidate.verdict != "PASS" and candidate.reasons else candidate.covered or ""
        cells = (_figure(candidate, metric, form) for _, metric, _, form in OVERVIEW)
        policy = full.index(exhibit) if exhibit in full else None
        yield Row(candidate.name, candidate.verdict, champion, note, tuple(cells), policy)


def _figure(candidate: Candidate, metric: str, form: str) -> str:
    value = candidate.metrics.get(metric)
    return number(value, form) if form else quantity(value)


def _numbers(data: curves.Curves) -> dict[str, list[tuple[str, ...]]]:
    """Return the numbers of the charts as rows of tables."""

    def table(some: Sequence[curves.Datum], shown: Callable[[curves.Datum], tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [(one["policy"], one["workload"], *shown(one)) for one in some]

    def distance(one: curves.Datum) -> tuple[str, ...]:
        measure, _ = MEASURES[one["measure"]]
        front = "yes" if one["front"] else ""
        return number(one["kib"], ".3f"), measure, quantity(one["exact"]), quantity(one["limit"]), front

    def bin_of_context(one: curves.Datum) -> tuple[str, ...]:
        place = matrix.shown_range(one["low"], one["high"])
        return place, quantity(one["kl"]), quantity(one["p99"]), f"{one['samples']:,}"

    def steps(one: curves.Datum) -> tuple[str, ...]:
        return f"{one['first']} to {one['last']}", quantity(one["kl"]), quantity(one["p95"]), f"{one['tokens']:,}"

    def place(one: curves.Datum) -> tuple[str, ...]:
        return one["context"], one["depth"], str(one["right"]), str(one["judged"]), quantity(one["kl"])

    return {
        "quality": table(data.quality, distance),
        "context": table(data.context, bin_of_context),
        "position": table(data.position, steps),
        "depth": table(data.depth, place),
    }


def _timed(name: str, system: Any) -> tuple[str, ...]:
    megabytes = None if system.pool_bytes is None else system.pool_bytes / MIBI
    return (
        name,
        number(system.decode_tokens_per_s, ",.0f"),
        _spread(system.decode_tokens_per_s_slow, system.decode_tokens_per_s_fast),
        number(system.inter_token_p50_ms, ".2f"),
        number(system.inter_token_p95_ms, ".2f"),
        number(system.inter_token_p99_ms, ".2f"),
        number(system.time_to_first_token_ms, ".1f"),
        number(system.kib_per_token, ".3f"),
        number(system.kib_per_token_allocated, ".3f"),
        number(megabytes, ",.1f"),
        number(system.max_live_tokens, ",.0f"),
    )


def _spread(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{number(low, ',.0f')} to {number(high, ',.0f')}"


def _load(systems: Sequence[tuple[str, Any]]) -> str:
    if not systems:
        return ""
    _, system = systems[-1]
    threads = f", {system.threads} threads" if system.threads is not None else ""
    return (
        f"{system.batch} sequences of {system.context_tokens:,} tokens, {system.new_tokens} decode steps{threads}; live tokens "
        f"in {system.budget_gib:g} GiB, in sequences of {system.sequence_tokens:,}"
    )


def _asked(exhibits: Sequence[Exhibit]) -> Iterator[Asked]:
    """Yield the workloads as they were asked of the candidate that was asked most of each."""
    whole: dict[str, tuple[Slice, Candidate]] = {}
    planned: dict[str, None] = {}
    for exhibit in exhibits:
        report: EvaluationReport | None = exhibit.report
        if report is None:
            continue
        planned |= dict.fromkeys(report.planned_workloads)
        for workload in dict.fromkeys(row.workload for row in exhibit.rows):
            part = report.slice(workload)
            if part is not None and (workload not in whole or part.samples > whole[workload][0].samples):
                whole[workload] = part, exhibit.candidate
    for workload in dict.fromkeys([*planned, *whole]):
        if workload not in whole:
            yield Asked(workload, 0, 0, "not asked yet", "–", "", "")
            continue
        part, candidate = whole[workload]
        counted, detectable = part.accuracy, candidate.detectable.get(workload)
        undecided = [e.candidate for e in exhibits if e.candidate.verdict == "INCONCLUSIVE"]
        needed = max((one.samples_needed.get(workload, 0) for one in undecided), default=0)
        yield Asked(
            workload,
            part.samples,
            part.documents,
            f"{counted.judged:,}" if counted is not None else "none: distances alone",
            number(counted.baseline, ".3f") if counted is not None else "–",
            detectable.text if detectable is not None else "",
            f"about {needed:,}" if needed else "",
        )


DIGEST = 64


def _engine(exhibit: Exhibit) -> Engine:
    candidate = exhibit.candidate
    digests = {name: text for name, text in exhibit.binds.items() if len(text) == DIGEST and text.isalnum()}
    digests |= {"engine": candidate.engine.digest, "baseline": candidate.baseline.digest, "report": candidate.report.digest}
    digests |= {"identity": candidate.identity.digest}
    other = {name: text for name, text in exhibit.binds.items() if name not in digests}
    if candidate.signed_by is not None:
        other["signed by"] = candidate.signed_by
    if candidate.registration is not None:
        other["registered as version"] = candidate.registration.model_version
        other["MLflow run"] = candidate.registration.run_id
    evidence: Path | None = exhibit.evidence
    return Engine(
        name=candidate.name,
        backend=candidate.backend,
        digests=tuple(digests.items()),
        other=tuple(other.items()),
        settings=tuple(_flat(exhibit.settings)),
        verify=None if evidence is None else f"kvgate stage=verify bundle={evidence}",
        warnings=candidate.warnings,
        problem=exhibit.problem,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", quantity(value) if isinstance(value, float) else str(value)
