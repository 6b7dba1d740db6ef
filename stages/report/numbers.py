"""The numbers behind the charts, aggregated from reports, samples and the statistics of every scored token."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.verdict.gates import LINES
from pipeline.verdict.gates.recovery import RECOVERY
from pipeline.verdict.record import finite
from pipeline.verdict.report import EvaluationReport, SampleRow, SystemMetrics
from stages.evaluate.distances.metrics import context_bin
from stages.evaluate.joining import TOKENS
from stages.report.exhibit import Exhibit

ALL = ""
"""In place of a workload or policy, which have names."""
BASELINE = "fp16 baseline"
"""What the names of FP16 engines begin with beside those of policies, one of which may be fp16 itself."""
FLOOR = 1e-6
"""Where values are drawn that are smaller, on logarithmic axes."""
DOTS = 3_000
"""Samples that are drawn as dots, of all policies together."""
DEPTHS = 5

Datum = dict[str, Any]
Numbers = dict[str, list[Datum]]

MEASURES = {
    "kl_mean": "max_mean_kl",
    "ppl_ratio": "max_ppl_ratio",
    "top10_overlap": "min_top10_overlap",
    "rms_delta_p": "max_rms_delta_p",
}
"""Field of a fidelity -> its gate."""
TITLES = {key: LINES[key].title + (", off 1" if LINES[key].equal else "") for key in MEASURES.values()}
"""Gate -> what the distance of its figure from FP16 is called."""


def numbers(exhibits: Sequence[Exhibit]) -> Numbers:
    """Return the numbers of each chart by its name; those of dots are of the samples behind `context`."""
    return {
        "recovery": recoveries(exhibits),
        "quality": quality(exhibits),
        "context": list(by_context(exhibits)),
        "dots": _dots(exhibits),
        "position": list(by_position(exhibits)),
        "depth": list(depths(exhibits)),
    }


def distance(key: str, value: float | None) -> float | None:
    """Return how far a figure is from that of an engine equal to FP16; lower is better."""
    if value is None:
        return None
    return LINES[key].equal - value if key.startswith("min_") else value - LINES[key].equal


def _drawn(value: float | None) -> float | None:
    """Return a number as a logarithmic axis has it, with three digits."""
    return None if value is None or not math.isfinite(value) else float(f"{max(value, FLOOR):.3g}")


def recoveries(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return what every policy keeps of the probability of right answers, of all questions first and then by kind of work."""
    return [
        {"policy": exhibit.candidate.name, "verdict": check.status, "place": check.where}
        | {"workload": ALL if check.where == "all" else check.where}
        | {"value": check.value, "bound": check.bound, "limit": check.threshold}
        for exhibit in exhibits
        for check in exhibit.candidate.checks
        if check.gate == RECOVERY and check.value is not None and check.bound is not None
    ]


def reports(exhibits: Sequence[Exhibit]) -> list[tuple[Exhibit, EvaluationReport]]:
    """Return the candidates whose report can be read."""
    return [(exhibit, exhibit.report) for exhibit in exhibits if exhibit.report is not None]


def baseline_names(exhibits: Sequence[Exhibit]) -> dict[str, str]:
    """Return what each baseline is called, by its digest: one of several is named after the first policy beside it."""
    first = {exhibit.candidate.baseline.digest: exhibit.candidate.name for exhibit in reversed(exhibits)}
    return {digest: BASELINE if len(first) == 1 else f"{BASELINE} of {name}" for digest, name in reversed(first.items())}


def _baselines(exhibits: Sequence[Exhibit]) -> list[tuple[str, Exhibit, EvaluationReport]]:
    """Return each baseline once by its name, with the candidate that was asked most beside it."""
    names, some = baseline_names(exhibits), sorted(reports(exhibits), key=lambda pair: len(pair[0].rows))
    found = {exhibit.candidate.baseline.digest: (exhibit, report) for exhibit, report in some}
    return [(names[digest], *pair) for digest, pair in found.items()]


def quality(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return every policy's distances by workload with the bytes of its cache, and the FP16 engine at the A/A floor."""
    data: list[Datum] = []
    for exhibit, report in reports(exhibits):
        candidate, kib = exhibit.candidate, report.system.kib_per_token
        limits = {check.gate: check.threshold for check in candidate.checks}
        for part in report.slices if kib is not None else ():
            for field, key in MEASURES.items() if part.whole else ():
                exact = distance(key, getattr(part.fidelity, field))
                data.append(
                    {"policy": candidate.name, "verdict": candidate.verdict, "workload": part.workload or ALL}
                    | {"measure": TITLES[key], "gate": key, "limit": distance(key, limits.get(key))}
                    | {"kib": kib, "exact": exact, "distance": _drawn(exact)}
                )
    for one in data:  # on the front is what no other policy beats in bytes and distance both
        rivals = [o for o in data if (o["gate"], o["workload"]) == (one["gate"], one["workload"]) and o["distance"] is not None]
        mine = (one["kib"], one["distance"])
        one["front"] = mine[1] is not None and not any(
            o["kib"] <= mine[0] and o["distance"] <= mine[1] and (o["kib"], o["distance"]) != mine for o in rivals
        )
    workloads = dict.fromkeys(one["workload"] for one in data)
    return data + [one for name, _, report in _baselines(exhibits) for one in _at_floor(name, report, list(workloads))]


def _at_floor(name: str, report: EvaluationReport, workloads: Sequence[str]) -> Iterator[Datum]:
    """Yield a baseline at its A/A floor, the distance that it has from itself."""
    for field, key in MEASURES.items():
        floor = report.noise
        exact = distance(key, getattr(floor, field)) if floor is not None else None
        for workload in workloads:
            yield (
                {"policy": name, "verdict": "baseline", "workload": workload, "measure": TITLES[key], "gate": key}
                | {"limit": None, "kib": report.baseline_system.kib_per_token, "exact": exact}
                | {"distance": _drawn(exact) or FLOOR, "front": False}
            )


def shown_range(low: int, high: int | None) -> str:
    """Return a context bin [low, high) in words."""
    return f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"


def by_context(exhibits: Sequence[Exhibit]) -> Iterator[Datum]:
    """Yield the mean KL of every policy by workload and context bin."""
    for exhibit, report in reports(exhibits):
        for part in report.slices:
            if part.context is None or part.depth or part.difficulty:
                continue
            low, high = part.context
            some = (row.context_tokens for row in exhibit.rows if part.workload in (None, row.workload))
            tokens = [count for count in some if low <= count < (high or math.inf)]
            yield (
                {"policy": exhibit.candidate.name, "workload": part.workload or ALL, "context": shown_range(low, high)}
                | {"tokens": float(np.mean(tokens)) if tokens else low, "samples": part.samples}
                | {"kl": _drawn(part.fidelity.kl_mean), "p99": _drawn(part.fidelity.kl_p99)}
            )


def _dots(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return samples of every policy with context and mean KL, evenly thinned out."""
    everything = [
        {"policy": e.candidate.name, "workload": r.workload, "tokens": r.context_tokens, "kl": _drawn(r.mean_kl)}
        for e in exhibits
        for r in e.rows
        if r.mean_kl is not None
    ]
    return everything[:: max(1, -(-len(everything) // DOTS))]


def by_position(exhibits: Sequence[Exhibit]) -> Iterator[Datum]:
    """Yield the mean and the 95th percentile of the KL by decode step and workload, of the policies whose tokens are there."""
    for exhibit in exhibits:
        kls = _token_kls(exhibit)
        for workload in (ALL, *dict.fromkeys(row.workload for row in exhibit.rows)) if kls else ():
            chosen = [kl for row, kl in zip(exhibit.rows, kls, strict=True) if workload in (ALL, row.workload)]
            for first, last, values in _binned(chosen):
                yield (
                    {"policy": exhibit.candidate.name, "workload": workload, "steps": f"{first} to {last}"}
                    | {"step": math.sqrt(first * last), "tokens": len(values), "kl": _drawn(float(values.mean()))}
                    | {"p95": _drawn(float(np.percentile(values, 95)))}
                )


def _token_kls(exhibit: Exhibit) -> list[Any]:
    """Return the KL of every scored token by sample; nothing where the file is missing or of other samples."""
    path = exhibit.candidate.report.path.with_name(TOKENS)
    try:
        kl = load_file(str(path))["kl"]
    except (OSError, KeyError, ValueError, SafetensorError):
        return []
    ends = np.cumsum([0, *(row.scored_tokens for row in exhibit.rows)]).tolist()
    return [kl[start:stop] for start, stop in pairwise(ends)] if ends[-1] == len(kl) else []


def _binned(kls: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield the first and last decode step of each bin, counted from 1, and the KL of its tokens; bins grow by half."""
    longest = max(map(len, kls), default=0)
    for low, high in pairwise([0, *sorted({*(2**n for n in range(20)), *(3 * 2**n for n in range(19))})]):
        values = np.concatenate([kl[low:high] for kl in kls]) if low < longest else ()
        if len(values):
            yield low + 1, min(high, longest), values


def depths(exhibits: Sequence[Exhibit]) -> Iterator[Datum]:
    """Yield right answers and KL by depth and context of the samples whose answer stands at a known depth, FP16 first."""
    engines = [(name, True, exhibit, report) for name, exhibit, report in _baselines(exhibits)]
    engines += [(exhibit.candidate.name, False, exhibit, report) for exhibit, report in reports(exhibits)]
    for name, is_baseline, exhibit, report in engines:
        edges = sorted({part.context[0] for part in report.slices if part.context is not None}) or [0]
        groups: dict[tuple[str, int, int, int | None], list[SampleRow]] = {}
        for row in exhibit.rows:
            if row.depth is not None and row.judged:
                low, high = context_bin(row.context_tokens, edges)
                for workload in (ALL, row.workload):
                    place = (workload, low, min(int(row.depth * DEPTHS), DEPTHS - 1), high)
                    groups.setdefault(place, []).append(row)
        for (workload, low, depth, high), rows in sorted(groups.items(), key=lambda item: item[0][:3]):
            right = sum(bool(row.baseline_correct if is_baseline else row.candidate_correct) for row in rows)
            kl = finite(float(np.mean(np.array([row.mean_kl for row in rows], np.float64))))
            yield (
                {"policy": name, "workload": workload, "low": low, "order": depth}
                | {"context": f"{low:,}–{high:,}" if high is not None else f"{low:,}+"}
                | {"depth": f"{100 * depth // DEPTHS}–{100 * (depth + 1) // DEPTHS} %"}
                | {"right": right, "judged": len(rows), "share": right / len(rows)}
                | {"kl": None if is_baseline else _drawn(kl)}
            )


def systems(exhibits: Sequence[Exhibit]) -> list[tuple[str, SystemMetrics]]:
    """Return the system metrics of each baseline and policy by name."""
    measured = [(name, report.baseline_system) for name, _, report in _baselines(exhibits)]
    return measured + [(exhibit.candidate.name, report.system) for exhibit, report in reports(exhibits)]
