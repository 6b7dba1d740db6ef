"""What a page shows, in the order in which it shows it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline.core.redaction import leaves
from pipeline.registry.summary import Candidate
from pipeline.verdict.gates import LINES
from pipeline.verdict.registry import Line
from pipeline.verdict.report import Slice, SystemMetrics
from pipeline.verdict.thresholds import Check, LineStatus
from stages.report.answers import changed_answers
from stages.report.charts import specifications
from stages.report.exhibit import Exhibit, Occasion
from stages.report.numbers import TITLES, baseline_names, numbers, reports, shown_range, systems
from stages.report.text import number, quantity

MOST_POLICIES = 16
"""Policies that are shown in full; those beyond have their row of the overview."""
WORST: tuple[LineStatus, ...] = ("PASS", "WARNING", "INCONCLUSIVE", "FAIL")
"""From the best to the worst."""
BOUND = "bound"
OVERVIEW = (
    ("recovery", "quality/recovery", "1", ".1%"),
    ("its bound", BOUND, "", ".1%"),
    ("right answers", "quality/accuracy_candidate", "quality/accuracy_baseline", ".3f"),
    ("mean KL", "quality/kl_mean", "0", ""),
    ("KiB/token", "memory/kib_per_token", "baseline/kib_per_token", ".3f"),
    ("samples", "quality/samples", "", ".0f"),
    ("decode tokens/s", "perf/decode_tokens_per_s", "baseline/decode_tokens_per_s", ",.0f"),
)
"""Few enough that a verdict's reason stands beside them on a laptop's screen; every check has the rest.
Heading, the candidate's metric, the baseline's metric (or its value by definition), format; without one, of any size.
BOUND is that of the line on recovery."""
COLUMNS = {
    "recovery": {"recovery": "value", "bound": "bound", "limit": "limit", "line": "verdict"},
    "quality": {
        "KiB/token": "kib",
        "measure": "measure",
        "distance from FP16": "exact",
        "gate": "limit",
        "on the front": "front",
    },
    "context": {"context [tokens]": "context", "mean KL": "kl", "99th percentile": "p99", "samples": "samples"},
    "position": {"decode steps": "steps", "mean KL": "kl", "95th percentile": "p95", "tokens": "tokens"},
    "depth": {"context [tokens]": "context", "depth": "depth", "right": "right", "of": "judged", "mean KL": "kl"},
}
"""The numbers of each chart as a table: heading -> field."""
SYSTEM = (
    ("decode tokens/s", "decode_tokens_per_s", ",.0f"),
    ("of one step in twenty, slower", "decode_tokens_per_s_slow", ",.0f"),
    ("faster", "decode_tokens_per_s_fast", ",.0f"),
    ("between tokens: median [ms]", "inter_token_p50_ms", ".2f"),
    ("95 %", "inter_token_p95_ms", ".2f"),
    ("99 %", "inter_token_p99_ms", ".2f"),
    ("first token [ms]", "time_to_first_token_ms", ".1f"),
    ("KiB/token", "kib_per_token", ".3f"),
    ("as allocated", "kib_per_token_allocated", ".3f"),
    ("pool [bytes]", "pool_bytes", ",.0f"),
    ("live tokens", "max_live_tokens", ",.0f"),
)
"""Heading, metric, format."""


@dataclass(frozen=True)
class Row:
    """A row of the overview: what an engine costs and what it loses."""

    name: str
    verdict: str | None
    """None for a baseline."""
    champion: bool
    note: str
    """Why it serves, or does not."""
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One line of one policy's verdict."""

    check: Check
    used: float | None
    """Share of the limit that the bound takes up; above 1 the limit is broken. None where that means nothing."""
    figures: tuple[str, str, str]
    """Value, bound and limit."""


@dataclass(frozen=True)
class Place:
    """A place of a gate, with the cell of each policy; None where a policy has no such line."""

    where: str
    workload: str | None
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Gate:
    """A gate: first the worst line of each policy, then all places."""

    key: str
    line: Line
    worst: tuple[Cell | None, ...]
    counts: tuple[str, ...]
    """Of each policy: how many of its lines pass."""
    places: list[Place]


def make_page(exhibits: Sequence[Exhibit], occasion: Occasion) -> dict[str, Any]:
    """Return what the page shows, by the names that its template has for it."""
    first = sorted(exhibits, key=lambda e: (e.candidate.name != occasion.champion, e.candidate.verdict != "PASS"))
    full = [exhibit for exhibit in exhibits if exhibit in first[:MOST_POLICIES]]
    workloads = list(dict.fromkeys(row.workload for exhibit in full for row in exhibit.rows))
    data, timed = numbers(full), systems(full)
    return {
        "occasion": occasion,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lead": _lead([exhibit.candidate for exhibit in exhibits], occasion.champion),
        "rows": list(_overview(exhibits, occasion)),
        "headings": [heading for heading, *_ in OVERVIEW],
        "policies": [exhibit.candidate for exhibit in full],
        "workloads": workloads,
        "gates": list(_gates(full, workloads)),
        "bins": list(_bins(full)),
        "charts": specifications(data, [exhibit.candidate.name for exhibit in full]),
        "columns": COLUMNS,
        "numbers": {
            name: [(one["policy"], one["workload"], *(_cell(one[field]) for field in columns.values())) for one in data[name]]
            for name, columns in COLUMNS.items()
        },
        "measures": list(TITLES.values()),
        "samples": f"{len(data['dots']):,} of {sum(len(exhibit.rows) for exhibit in full):,} samples",
        "answers": changed_answers(full),
        "system": [heading for heading, *_ in SYSTEM],
        "timed": [(name, *(number(getattr(one, metric), form) for _, metric, form in SYSTEM)) for name, one in timed],
        "load": _load(timed[-1][1]) if timed else "",
        "asked": list(_asked(full)),
        "engines": [(exhibit, _identity(exhibit), _settings(exhibit)) for exhibit in full],
    }


def _lead(candidates: Sequence[Candidate], champion: str | None) -> str:
    words = {"PASS": "held up", "INCONCLUSIVE": "not decided", "FAIL": "failed"}
    counts = {status: sum(c.verdict == status for c in candidates) for status in words}
    told = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    noun = "KV cache" if len(candidates) == 1 else "KV caches"
    first = next((c for c in candidates if c.name == champion or len(candidates) == 1), None)
    keeps = f" {first.name} {first.kept}." if first is not None and first.kept is not None else ""
    return f"{len(candidates)} {noun} judged against FP16 on the decode path: {told}.{keeps}"


def _overview(exhibits: Sequence[Exhibit], occasion: Occasion) -> Iterator[Row]:
    judged_by = {exhibit.candidate.baseline.digest: exhibit.candidate for exhibit in reversed(exhibits)}
    for digest, name in baseline_names(exhibits).items():
        judged = judged_by[digest]
        cells = tuple(_figure(judged, metric, form) if "/" in metric else metric for _, _, metric, form in OVERVIEW)
        yield Row(name, None, champion=False, note="", cells=cells)
    for candidate in (exhibit.candidate for exhibit in exhibits):
        note = occasion.passed_over.get(candidate.name, "")
        if not note:
            note = candidate.reasons[0] if candidate.verdict != "PASS" and candidate.reasons else candidate.covered or ""
        note = "; ".join(filter(None, (note, candidate.contradiction)))
        cells = tuple(_figure(candidate, metric, form) for _, metric, _, form in OVERVIEW)
        yield Row(candidate.name, candidate.verdict, candidate.name == occasion.champion, note, cells)


def _figure(candidate: Candidate, metric: str, form: str) -> str:
    line = candidate.recovery
    value = candidate.metrics.get(metric) if metric != BOUND else None if line is None else line.bound
    return number(value, form) if form else quantity(value)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    return quantity(value) if isinstance(value, float | None) else str(value)


def _gates(exhibits: Sequence[Exhibit], workloads: Sequence[str]) -> Iterator[Gate]:
    """Yield the verdict matrix, its gates and places in the order of the verdicts."""
    tables = [{(check.gate, check.where): _judged(check) for check in exhibit.candidate.checks} for exhibit in exhibits]
    places: dict[str, dict[str, None]] = {}
    for key, where in (place for table in tables for place in table):
        places.setdefault(key, {})[where] = None
    for key, wheres in places.items():
        found = [
            Place(where, _workload(where, workloads), tuple(table.get((key, where)) for table in tables)) for where in wheres
        ]
        columns = [
            [cell for cell in column if cell is not None] for column in zip(*(place.cells for place in found), strict=True)
        ]
        worst = (max(c, key=lambda cell: (WORST.index(cell.check.status), cell.used or 0.0), default=None) for c in columns)
        counts = (f"{sum(cell.check.status == 'PASS' for cell in c)} of {len(c)}" if c else "" for c in columns)
        yield Gate(key, LINES.get(key, Line(key, "", "all")), tuple(worst), tuple(counts), found)


def _workload(where: str, workloads: Sequence[str]) -> str | None:
    """Return the workload that a place belongs to: `copy`, `copy [0, 256)` or `copy, drafts by lookup`."""
    return next((name for name in workloads if where == name or where.startswith((f"{name} [", f"{name}, "))), None)


def _judged(check: Check) -> Cell:
    equal = LINES[check.gate].equal if check.gate in LINES else 0.0
    bound = check.bound if check.bound is not None else check.value if check.gate == "conformance" else None
    means_something = bound is not None and check.threshold not in (None, equal)
    used = max(0.0, (bound - equal) / (check.threshold - equal)) if means_something else None  # type: ignore[operator]

    def shown(value: float | None) -> str:
        if check.gate == "accuracy" and value is not None:  # in points
            return number(100 * value, "+.1f").replace("+0.0", "0")
        return number(value, ",.4f") if check.gate == "max_ppl_ratio" else quantity(value)

    return Cell(check, used, (shown(check.value), shown(check.bound), shown(check.threshold)))


def _bins(exhibits: Sequence[Exhibit]) -> Iterator[tuple[str, str, list[tuple[Slice, LineStatus | None] | None]]]:
    """Yield workload, context bin, and each policy's part with the status of its own line: a bin can fail alone."""
    tables: list[dict[tuple[str, int, int | None], tuple[Slice, LineStatus | None]]] = []
    for exhibit in exhibits:
        statuses = {check.where: check.status for check in exhibit.candidate.checks if check.gate == "accuracy"}
        parts = exhibit.report.slices if exhibit.report is not None else ()
        tables.append({(p.workload, *p.context): (p, statuses.get(p.place)) for p in parts if p.workload and p.context})
    for place in sorted({place for table in tables for place in table}, key=lambda place: place[:2]):
        yield place[0], shown_range(*place[1:]), [table.get(place) for table in tables]


def _load(system: SystemMetrics) -> str:
    threads = f", {system.threads} threads" if system.threads is not None else ""
    return (
        f"{system.batch} sequences of {system.context_tokens:,} tokens, {system.new_tokens} decode steps{threads}; live tokens "
        f"in {system.budget_gib:g} GiB, in sequences of {system.sequence_tokens:,}"
    )


def _asked(exhibits: Sequence[Exhibit]) -> Iterator[tuple[str, ...]]:
    """Yield the workloads as they were asked of the candidate that was asked most of each."""
    whole: dict[str, Slice] = {}
    planned: dict[str, None] = {}
    for exhibit, report in reports(exhibits):
        planned |= dict.fromkeys([*report.planned_workloads, *(row.workload for row in exhibit.rows)])
        for part in report.slices:
            name = part.workload or ""
            if part.whole and name and (name not in whole or part.samples > whole[name].samples):
                whole[name] = part
    undecided = [e.candidate for e in exhibits if e.candidate.verdict == "INCONCLUSIVE"]
    for workload in planned:
        if workload not in whole:
            yield workload, "0", "0", "not asked yet", "", "–", ""
            continue
        part = whole[workload]
        counted = part.accuracy
        needed = max((one.samples_needed.get(workload, 0) for one in undecided), default=0)
        yield (
            workload,
            f"{part.samples:,}",
            f"{part.documents:,}",
            f"{counted.judged:,}" if counted is not None else "none: distances alone",
            _scored(workload, exhibits),
            number(counted.baseline, ".3f") if counted is not None else "–",
            f"about {needed:,}" if needed else "",
        )


def _scored(workload: str, exhibits: Sequence[Exhibit]) -> str:
    """Say in whose words right answers were scored."""
    words = {
        row.id: row.right_answer for exhibit in exhibits for row in exhibit.rows if row.workload == workload and row.judged
    }
    own = sum(of == "baseline" for of in words.values())
    parts = {"the reference's": len(words) - own, "FP16's own": own}
    return ", ".join(f"{name} ({count:,})" if own else name for name, count in parts.items() if count)


def _identity(exhibit: Exhibit) -> dict[str, str]:
    """Return of which engine a verdict is: digests, libraries, the machine, and where it is registered."""
    candidate = exhibit.candidate
    cited = {name: getattr(candidate, name).digest for name in ("engine", "baseline", "report", "identity")}
    found = {**exhibit.binds, **cited, "signed by": candidate.signed_by}
    if candidate.registration is not None:
        found |= {"registered as version": candidate.registration.model_version, "MLflow run": candidate.registration.run_id}
    return {name: text for name, text in found.items() if text is not None}


def _settings(exhibit: Exhibit) -> dict[str, str]:
    return {name: quantity(value) if isinstance(value, float) else str(value) for name, value in leaves(exhibit.settings)}
