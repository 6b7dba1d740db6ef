"""The numbers behind the charts, aggregated from reports, samples and the statistics of every scored token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.verdict.record import finite
from pipeline.verdict.report import Fidelity, SampleRow, SystemMetrics
from stages.evaluate.distances.metrics import context_bin
from stages.evaluate.joining import TOKENS
from stages.report.exhibit import Exhibit

ALL = ""
"""In place of a workload or policy, which have names."""

BASELINE = "fp16 baseline"
"""What the FP16 engine is called beside the policies, one of which may be fp16 itself."""

FLOOR = 1e-6
"""Where values are drawn that are smaller, on logarithmic axes."""

DOTS = 3_000
"""Samples that are drawn as dots, of all policies together."""

DEPTHS = 5

Datum = dict[str, Any]

MEASURES: dict[str, tuple[str, str]] = {
    "kl_mean": ("Mean KL [nats/token]", "max_mean_kl"),
    "ppl_ratio": ("Perplexity ratio − 1", "max_ppl_ratio"),
    "top10_overlap": ("1 − top-10 overlap", "min_top10_overlap"),
    "rms_delta_p": ("RMS change of p", "max_rms_delta_p"),
}
"""Field of a fidelity -> what its distance from FP16 is called, and its gate."""


@dataclass(frozen=True)
class Curves:
    """The numbers of all charts."""

    quality: list[Datum]
    context: list[Datum]
    dots: list[Datum]
    rows: int
    """Samples that the dots are of."""
    position: list[Datum]
    depth: list[Datum]
    times: list[Datum]

    @classmethod
    def of(cls, exhibits: Sequence[Exhibit]) -> "Curves":
        points, rows = dots(exhibits)
        return cls(
            quality(exhibits), by_context(exhibits), points, rows, by_position(exhibits), depths(exhibits), latencies(exhibits)
        )


def _distance(measure: str, value: float | None) -> float | None:
    """Return how far a figure is from that of an engine equal to FP16; lower is better."""
    if value is None:
        return None
    return {"ppl_ratio": value - 1, "top10_overlap": 1 - value}.get(measure, value)


def _drawn(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else max(value, FLOOR)


def quality(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return every policy's distances by workload with the bytes of its cache, and the FP16 engine at the A/A floor."""
    data: list[Datum] = []
    for exhibit in exhibits:
        report, candidate = exhibit.report, exhibit.candidate
        kib = report.system.kib_per_token if report is not None else None
        if report is None or kib is None:
            continue
        limits = {check.gate: check.threshold for check in candidate.checks}
        for part in report.slices:
            if not part.whole:
                continue
            for measure, (_, gate) in MEASURES.items():
                distance = _distance(measure, getattr(part.fidelity, measure))
                datum = {"policy": candidate.name, "verdict": candidate.verdict, "workload": part.workload or ALL}
                data.append(
                    datum
                    | {"measure": measure, "kib": kib, "distance": _drawn(distance), "exact": distance}
                    | {"limit": _distance(measure, limits.get(gate))}
                )
    _mark_front(data)
    return data + list(_references(exhibits, data))


def _mark_front(data: Sequence[Datum]) -> None:
    """Mark what no other policy beats in bytes and distance both."""
    for one in data:
        rivals = [o for o in data if (o["measure"], o["workload"]) == (one["measure"], one["workload"])]
        mine = (one["kib"], one["distance"])
        one["front"] = mine[1] is not None and not any(
            o["distance"] is not None and o["kib"] <= mine[0] and o["distance"] <= mine[1] and (o["kib"], o["distance"]) != mine
            for o in rivals
        )


def _references(exhibits: Sequence[Exhibit], data: Sequence[Datum]) -> Iterator[Datum]:
    """Yield each baseline as a point at its A/A floor, the distance that it has from itself."""
    baselines = {e.candidate.baseline.digest: e.report for e in reversed(exhibits) if e.report is not None}
    for report in baselines.values():
        floor: Fidelity | None = report.noise.fidelity
        for workload in dict.fromkeys(datum["workload"] for datum in data):
            for measure in MEASURES:
                exact = _distance(measure, getattr(floor, measure)) if floor is not None else None
                yield {
                    "policy": BASELINE,
                    "verdict": "baseline",
                    "workload": workload,
                    "measure": measure,
                    "kib": report.baseline_system.kib_per_token,
                    "distance": _drawn(exact) or FLOOR,
                    "exact": exact,
                    "limit": None,
                    "front": False,
                }


def by_context(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return the mean KL of every policy by workload and context bin."""
    data = []
    for exhibit in exhibits:
        for part in exhibit.report.slices if exhibit.report is not None else ():
            if part.context is None or part.depth or part.difficulty:
                continue
            low, high = part.context
            tokens = [
                r.context_tokens for r in _in(exhibit.rows, part.workload) if low <= r.context_tokens < (high or math.inf)
            ]
            data.append(
                {"policy": exhibit.candidate.name, "workload": part.workload or ALL, "low": low, "high": high}
                | {"tokens": float(np.mean(tokens)) if tokens else low, "samples": part.samples}
                | {"kl": _drawn(part.fidelity.kl_mean), "p99": _drawn(part.fidelity.kl_p99)}
            )
    return data


def _in(rows: Sequence[SampleRow], workload: str | None) -> list[SampleRow]:
    return [row for row in rows if workload in (None, row.workload)]


def dots(exhibits: Sequence[Exhibit]) -> tuple[list[Datum], int]:
    """Return the samples of every policy with context and mean KL, and how many there are in all; evenly thinned out."""
    everything = [
        {"policy": e.candidate.name, "workload": r.workload, "tokens": r.context_tokens, "kl": _short(_drawn(r.mean_kl))}
        for e in exhibits
        for r in e.rows
        if r.mean_kl is not None
    ]
    step = max(1, -(-len(everything) // DOTS))
    return everything[::step], len(everything)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def by_position(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return the mean and the 95th percentile of the KL by decode step and workload, of the policies whose tokens are there."""
    data: list[Datum] = []
    for exhibit in exhibits:
        kls = _token_kls(exhibit)
        if kls is None:
            continue
        workloads = dict.fromkeys(row.workload for row in exhibit.rows)
        for workload in (ALL, *workloads):
            chosen = [kl for row, kl in zip(exhibit.rows, kls, strict=True) if workload in (ALL, row.workload)]
            for first, last, values in _binned(chosen):
                data.append(
                    {"policy": exhibit.candidate.name, "workload": workload, "first": first, "last": last}
                    | {"step": math.sqrt(first * last), "tokens": len(values)}
                    | {"kl": _short(_drawn(finite(float(values.mean()))))}
                    | {"p95": _short(_drawn(finite(float(np.percentile(values, 95)))))}
                )
    return data


def _token_kls(exhibit: Exhibit) -> list[Any] | None:
    """Return the KL of every scored token by sample; None where the file is missing or of other samples."""
    path = exhibit.candidate.report.path.with_name(TOKENS)
    try:
        kl = load_file(str(path))["kl"]
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
    ends = np.cumsum([0, *(row.scored_tokens for row in exhibit.rows)]).tolist()
    return [kl[start:stop] for start, stop in pairwise(ends)] if ends[-1] == len(kl) and len(kl) else None


def _binned(kls: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield the first and last decode step of each bin, counted from 1, and the KL of its tokens; bins grow by half."""
    longest = max(map(len, kls), default=0)
    edges = [0, *sorted({*(2**n for n in range(20)), *(3 * 2**n for n in range(19))})]
    for low, high in pairwise(edges):
        if low >= longest:
            return
        values = np.concatenate([kl[low:high] for kl in kls])
        if len(values):
            yield low + 1, min(high, longest), values


def depths(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return right answers and KL by depth and context of the samples whose answer stands at a known depth, FP16 first."""
    baselines = {e.candidate.baseline.digest: e for e in sorted(exhibits, key=lambda e: len(e.rows))}
    data = []
    for exhibit, is_baseline in chain(((e, True) for e in baselines.values()), ((e, False) for e in exhibits)):
        if exhibit.report is None:
            continue
        edges = sorted({part.context[0] for part in exhibit.report.slices if part.context is not None}) or [0]
        groups: dict[tuple[str, int, int | None, int], list[SampleRow]] = {}
        for row in exhibit.rows:
            if row.depth is None or not row.judged:
                continue
            place = (*context_bin(row.context_tokens, edges), min(int(row.depth * DEPTHS), DEPTHS - 1))
            for workload in (ALL, row.workload):
                groups.setdefault((workload, *place), []).append(row)
        for (workload, low, high, depth), rows in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1], item[0][3])):
            right = sum(bool(row.baseline_correct if is_baseline else row.candidate_correct) for row in rows)
            kl = float(np.mean([math.nan if row.mean_kl is None else row.mean_kl for row in rows]))
            data.append(
                {"policy": BASELINE if is_baseline else exhibit.candidate.name, "workload": workload}
                | {"context": f"{low:,}–{high:,}" if high is not None else f"{low:,}+", "low": low}
                | {"depth": f"{100 * depth // DEPTHS}–{100 * (depth + 1) // DEPTHS} %", "order": depth}
                | {"right": right, "judged": len(rows), "share": right / len(rows)}
                | {"kl": None if is_baseline else _short(_drawn(finite(kl)))}
            )
    return data


def systems(exhibits: Sequence[Exhibit]) -> list[tuple[str, SystemMetrics]]:
    """Return the system metrics of each baseline and policy by name."""
    baselines = {e.candidate.baseline.digest: e.report for e in reversed(exhibits) if e.report is not None}
    measured = [(BASELINE, report.baseline_system) for report in baselines.values()]
    return measured + [(e.candidate.name, e.report.system) for e in exhibits if e.report is not None]


def latencies(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return throughput with the steps of which nine in ten are between, and the percentiles of the time between tokens."""
    return [
        {"policy": name, "rate": system.decode_tokens_per_s}
        | {"slow": system.decode_tokens_per_s_slow, "fast": system.decode_tokens_per_s_fast, "p50": system.inter_token_p50_ms}
        | {"p95": system.inter_token_p95_ms, "p99": system.inter_token_p99_ms}
        for name, system in systems(exhibits)
    ]
