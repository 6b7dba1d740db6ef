"""The SVG charts of report.html: recovery, quality against bytes, and KL by context length.

Vega-Lite draws the charts of `charts.yaml` when the page is written. Colours are the page's CSS variables, so that charts
follow the theme. Lines have a contrast of at least 3 to 1 on the light and the dark background.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from stages.report.exhibit import BASELINE, Exhibit, shown
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Gate

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


def _distance(kl: float | None) -> Datum:
    """Return a mean KL, and its place on a logarithmic axis: at least FLOOR; None if it is missing or not finite."""
    return {"exact": kl, "distance": None if kl is None or not math.isfinite(kl) else max(kl, FLOOR)}


def _point(candidate: Candidate, verdict: str) -> Datum:
    """Return the fields of every point, without secrets and invisible characters in the candidate's name."""
    limit = next((check.threshold for check in candidate.checks if check.gate == Gate.MEAN_KL), None)
    return {"policy": shown(candidate.name), "verdict": verdict, "limit": limit}


def baseline_names(exhibits: Sequence[Exhibit]) -> dict[str, str]:
    """Return digest -> display name of the baselines. If there are several, each is named after its first policy."""
    first = {exhibit.candidate.baseline.digest: exhibit.candidate.name for exhibit in reversed(exhibits)}
    return {digest: BASELINES if len(first) == 1 else f"{BASELINES} of {name}" for digest, name in reversed(first.items())}


def recovery_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's recovery: first for all questions, then by workload."""
    return [
        {**_point(exhibit.candidate, check.status), "place": shown(check.where)}
        | {"value": check.value, "bound": check.bound, "limit": check.threshold}
        for exhibit in exhibits
        for check in exhibit.candidate.checks
        if check.gate == Gate.RECOVERY and check.value is not None and check.bound is not None
    ]


def quality_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's mean KL and bytes per token, then each FP16 baseline with its noise floor."""
    readable = [(exhibit, exhibit.report) for exhibit in exhibits if exhibit.report is not None]
    data: list[Datum] = []
    for exhibit, report in readable:
        whole, kib = report.slice(), report.tests.system.kib_per_token
        if kib is not None and whole is not None:
            point = _point(exhibit.candidate, exhibit.candidate.verdict)
            data.append({**point, "kib": kib, **_distance(whole.fidelity.kl_mean)})
    by_rows = sorted(readable, key=lambda item: len(item[0].rows))
    baselines = {exhibit.candidate.baseline.digest: report for exhibit, report in by_rows}
    for digest, name in baseline_names(exhibits).items():
        if digest in baselines:
            tests = baselines[digest].baseline_tests
            distance = _distance(None if tests.noise is None else tests.noise.kl_mean)
            point = {"policy": shown(name), "verdict": BASELINE, "limit": None}
            data.append({**point, **distance, "kib": tests.system.kib_per_token, "distance": distance["distance"] or FLOOR})
    return data


def context_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    data = []
    for exhibit in exhibits:
        for part in () if exhibit.report is None else exhibit.report.slices:
            if part.context is None or part.workload is not None:
                continue
            low, high = part.context
            tokens = [row.context_tokens for row in exhibit.rows if low <= row.context_tokens < (high or math.inf)]
            length = sum(tokens) / len(tokens) if tokens else low
            point = _point(exhibit.candidate, exhibit.candidate.verdict)
            data.append({**point, "tokens": length, **_distance(part.fidelity.kl_mean)})
    return data


NUMBERS: dict[str, Callable[[Sequence[Exhibit]], list[Datum]]] = {
    "recovery": recovery_numbers,
    "quality": quality_numbers,
    "context": context_numbers,
}
