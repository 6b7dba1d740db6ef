"""The verdict matrix: every line that decided, check by policy, with the context bins as a second layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.verdict.report import EvaluationReport, Slice
from pipeline.verdict.thresholds import Check, LineStatus
from stages.report.exhibit import Exhibit
from stages.report.text import number, quantity

GATES: dict[str, tuple[str, str]] = {
    "accuracy": ("Right answers", "points that the policy gains or loses against FP16"),
    "max_mean_kl": ("Mean KL", "nats per token from FP16"),
    "min_top10_overlap": ("Top-10 overlap", "share of the ten most likely tokens that both agree on"),
    "max_ppl_ratio": ("Perplexity ratio", "the policy's over that of FP16"),
    "max_rms_delta_p": ("RMS change of p", "of the reference token's probability"),
    "max_acceptance_loss": ("Acceptance loss", "share of the tokens a pass under speculative decoding"),
    "max_ruined_share": ("Ruined requests", "share whose mean KL is beyond four times its limit"),
    "max_p999_kl": ("Far tokens", "share of the tokens with a KL above gates.max_p999_kl"),
    "max_kl_slope": ("Growth of KL", "nats per 1,000 tokens of context"),
    "canary": ("Canary", "mean KL of the policy with corrupted key scales, which has to be noticed"),
    "ladder": ("Canary's ladder", "smaller planted faults that were noticed; it decides nothing"),
    "conformance": ("Conformance", "distance from the oracle, as a share of what rounding explains"),
    "probe": ("Stress probe", "places that deviate from the oracle on random tokens"),
    "allocation": ("Allocation", "bytes that are not those of the policy"),
    "free_answers": ("Free answers", "samples whose free answer contradicts the forced one"),
    "reused_prefixes": ("Reused prefixes", "samples that differ over reused prefixes"),
}
"""Gate -> its title, and what its value is. Others are shown by their key."""

WORST: tuple[LineStatus, ...] = ("PASS", "WARNING", "INCONCLUSIVE", "FAIL")
"""From the best to the worst."""

IN_POINTS = "accuracy"


@dataclass(frozen=True)
class Cell:
    """One line of one policy."""

    status: LineStatus
    where: str
    value: str
    bound: str
    threshold: str
    used: float | None
    """Share of the limit that the bound takes up; above 1 the limit is broken. None where that means nothing."""
    reason: str

    @property
    def percent(self) -> str:
        return "" if self.used is None else f"{min(self.used, 9.99):.0%}"


@dataclass(frozen=True)
class Line:
    """A place of a gate, with the cell of each policy; None where a policy has no such line."""

    where: str
    workload: str | None
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Gate:
    """A gate: first the worst line of each policy, then all places."""

    key: str
    title: str
    says: str
    worst: tuple[Cell | None, ...]
    counts: tuple[str, ...]
    """Of each policy: how many of its lines pass."""
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Bin:
    """What a policy did to the samples of a workload in a context bin."""

    answers: str
    kl: str
    samples: int
    status: LineStatus | None
    """Of the verdict's own line on this bin; None where it has none."""


@dataclass(frozen=True)
class BinLine:
    workload: str
    context: str
    cells: tuple[Bin | None, ...]


def gates(exhibits: Sequence[Exhibit], workloads: Sequence[str]) -> list[Gate]:
    """Return the verdict matrix, its gates and places in the order of the verdicts."""
    tables = [{(check.gate, check.where): check for check in exhibit.candidate.checks} for exhibit in exhibits]
    places: dict[str, dict[str, None]] = {}
    for table in tables:
        for gate, where in table:
            places.setdefault(gate, {})[where] = None
    return [_gate(key, list(wheres), tables, workloads) for key, wheres in places.items()]


def _gate(key: str, wheres: Sequence[str], tables: Sequence[dict[tuple[str, str], Check]], workloads: Sequence[str]) -> Gate:
    lines = tuple(
        Line(where, _workload(where, workloads), tuple(_cell(table.get((key, where))) for table in tables)) for where in wheres
    )
    worst, counts = [], []
    for column in range(len(tables)):
        cells = [line.cells[column] for line in lines]
        present = [cell for cell in cells if cell is not None]
        worst.append(max(present, key=lambda cell: (WORST.index(cell.status), cell.used or 0.0), default=None))
        counts.append(f"{sum(cell.status == 'PASS' for cell in present)} of {len(present)}" if present else "")
    title, says = GATES.get(key, (key, ""))
    return Gate(key, title, says, tuple(worst), tuple(counts), lines)


def _workload(where: str, workloads: Sequence[str]) -> str | None:
    """Return the workload that a place belongs to: `copy`, `copy [0, 256)` or `copy, drafts by lookup`."""
    return next((name for name in workloads if where == name or where.startswith((f"{name} [", f"{name}, "))), None)


def _cell(check: Check | None) -> Cell | None:
    if check is None:
        return None
    value, bound, threshold = (_shown(check.gate, figure) for figure in (check.value, check.bound, check.threshold))
    return Cell(check.status, check.where, value, bound, threshold, _used(check), check.reason)


def _shown(gate: str, value: float | None) -> str:
    if gate == IN_POINTS and value is not None:
        return number(100 * value, "+.1f").replace("+0.0", "0")
    return number(value, ",.4f") if gate == "max_ppl_ratio" else quantity(value)


def _used(check: Check) -> float | None:
    """Return how much of its limit a line's bound takes up."""
    bound = check.bound if check.bound is not None else check.value if check.gate == "conformance" else None
    if bound is None or not check.threshold:
        return None
    if check.gate == "max_ppl_ratio":
        return max(0.0, (bound - 1) / (check.threshold - 1))
    if check.gate.startswith("min_"):
        return max(0.0, (1 - bound) / (1 - check.threshold))
    return max(0.0, bound / check.threshold)


def bins(exhibits: Sequence[Exhibit]) -> list[BinLine]:
    """Return the context bins of every workload. A bin can fail alone, and is never said to pass."""
    tables = [dict(_bins(exhibit)) for exhibit in exhibits]
    places = sorted({place for table in tables for place in table}, key=lambda place: (place[0], place[1]))
    return [
        BinLine(workload, shown_range(low, high), tuple(table.get((workload, low, high)) for table in tables))
        for workload, low, high in places
    ]


def shown_range(low: int, high: int | None) -> str:
    """Return a context bin [low, high) in words."""
    return f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"


def _bins(exhibit: Exhibit) -> Iterator[tuple[tuple[str, int, int | None], Bin]]:
    report: EvaluationReport | None = exhibit.report
    for part in report.slices if report is not None else ():
        if part.workload is None or part.context is None:
            continue
        low, high = part.context
        status = next((c.status for c in exhibit.candidate.checks if (c.gate, c.where) == ("accuracy", part.place)), None)
        yield (part.workload, low, high), Bin(_answers(part), quantity(part.fidelity.kl_mean), part.samples, status)


def _answers(part: Slice) -> str:
    counted = part.accuracy
    if counted is None:
        return "no answers"
    changed = f", {counted.lost} lost" if counted.lost else ""
    gained = f", {counted.gained} gained" if counted.gained else ""
    return f"{round(counted.candidate * counted.judged)} of {counted.judged} right{changed}{gained}"
