"""The SVG charts of report.html: recovery, quality against bytes, and KL by context length.

Vega-Lite draws the charts of `charts.yaml` when the page is written. Colours are the page's CSS variables, so that charts
follow the theme. Lines have a contrast of at least 3 to 1 on the light and the dark background.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from stages.report.exhibit import BASELINE, Exhibit, shown
from stages.verdict.report import EvaluationReport
from stages.verdict.thresholds import Gate

BASELINES = "fp16 baseline"
"""Prefix of the names of FP16 baselines. It differs from "fp16", because a policy may have that name."""
FLOOR = 1e-6
"""Smallest value on a logarithmic axis."""

Datum = dict[str, Any]
Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    svg: Markup


def draw_charts(exhibits: Sequence[Exhibit]) -> dict[str, Chart]:
    """Return chart name -> chart, without charts that have no data."""
    data = {name: numbers(exhibits) for name, numbers in NUMBERS.items()}
    data = {name: rows for name, rows in data.items() if any(row["verdict"] != BASELINE for row in rows)}
    specs = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    charts = [{**specs[name], "config": specs["config"], "data": {"values": rows}} for name, rows in data.items()]
    drawings = draw_svg(charts) if charts else []
    return {name: Chart(**specs[name]["usermeta"], svg=Markup(svg)) for name, svg in zip(data, drawings, strict=True)}


def draw_svg(specs: Sequence[Spec]) -> list[str]:
    """Render Vega-Lite specifications as SVG. Vega escapes the texts.

    Vega runs in a process of its own: its threads would hang in every process that this one forks later.
    """
    script = (
        f"import sys; sys.path[:] = {sys.path!r}; import json, vl_convert; "
        "json.dump([vl_convert.vegalite_to_svg(spec) for spec in json.load(sys.stdin)], sys.stdout)"
    )
    payload = json.dumps(specs)
    drawn = subprocess.run([sys.executable, "-c", script], input=payload, capture_output=True, text=True, check=True)
    return [str(svg) for svg in json.loads(drawn.stdout)]


def _axis_value(value: float | None) -> float | None:
    """Return a value for a logarithmic axis, at least FLOOR; None if it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else max(value, FLOOR)


def _readable(exhibits: Sequence[Exhibit]) -> Iterator[tuple[Exhibit, EvaluationReport, Datum]]:
    """Yield (candidate, report, fields of the candidate's points) for candidates with a readable report."""
    for exhibit in exhibits:
        candidate = exhibit.candidate
        limit = next((check.threshold for check in candidate.checks if check.gate == Gate.MEAN_KL), None)
        if exhibit.report is not None:
            yield exhibit, exhibit.report, {**_point(candidate.name, candidate.verdict), "limit": limit}


def _point(policy: str, verdict: str) -> Datum:
    """Return the fields of every point, without secrets and invisible characters in the policy's name."""
    return {"policy": shown(policy), "verdict": verdict}


def baseline_names(exhibits: Sequence[Exhibit]) -> dict[str, str]:
    """Return digest -> display name of the baselines. If there are several, each is named after its first policy."""
    first = {exhibit.candidate.baseline.digest: exhibit.candidate.name for exhibit in reversed(exhibits)}
    return {digest: BASELINES if len(first) == 1 else f"{BASELINES} of {name}" for digest, name in reversed(first.items())}


def recovery_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's recovery: first for all questions, then by kind of work."""
    return [
        {**_point(exhibit.candidate.name, check.status), "place": shown(check.where)}
        | {"value": check.value, "bound": check.bound, "limit": check.threshold}
        for exhibit in exhibits
        for check in exhibit.candidate.checks
        if check.gate == Gate.RECOVERY and check.value is not None and check.bound is not None
    ]


def quality_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's mean KL and bytes per token, then each FP16 baseline with its noise floor."""
    data: list[Datum] = []
    readable = list(_readable(exhibits))
    for _, report, point in readable:
        whole = report.slice()
        if report.system.kib_per_token is not None and whole is not None:
            kl = whole.fidelity.kl_mean
            data.append({**point, "kib": report.system.kib_per_token, "exact": kl, "distance": _axis_value(kl)})
    mark_front(data)
    by_rows = sorted(readable, key=lambda item: len(item[0].rows))
    baselines = {exhibit.candidate.baseline.digest: report for exhibit, report, _ in by_rows}
    for digest, name in baseline_names(exhibits).items():
        if digest in baselines:
            noise, system = baselines[digest].noise, baselines[digest].baseline_system
            exact = None if noise is None else noise.kl_mean
            place = {"kib": system.kib_per_token, "exact": exact, "distance": _axis_value(exact) or FLOOR}
            data.append({**_point(name, BASELINE), **place, "limit": None, "front": False})
    return data


def mark_front(data: Sequence[Datum]) -> None:
    """Set `front` on each point: true if no different point is at least as good in bytes and in distance (the Pareto front)."""
    places = [(row["kib"], row["distance"]) for row in data if row["distance"] is not None]
    for row in data:
        mine = row["kib"], row["distance"]
        row["front"] = mine in places and not any(p[0] <= mine[0] and p[1] <= mine[1] and p != mine for p in places)


def context_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return the mean KL of every policy by context bin."""
    data = []
    for exhibit, report, point in _readable(exhibits):
        for part in report.slices:
            if part.context is None or part.workload is not None:
                continue
            low, high = part.context
            tokens = [row.context_tokens for row in exhibit.rows if low <= row.context_tokens < (high or math.inf)]
            length = sum(tokens) / len(tokens) if tokens else low
            data.append({**point, "tokens": length, "distance": _axis_value(part.fidelity.kl_mean)})
    return data


NUMBERS: dict[str, Callable[[Sequence[Exhibit]], list[Datum]]] = {
    "recovery": recovery_numbers,
    "quality": quality_numbers,
    "context": context_numbers,
}
"""Name of a chart -> its data."""
