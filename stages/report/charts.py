"""The SVG charts of report.html: recovery, quality against bytes, and KL by context length.

Vega-Lite draws the charts when the page is written. Colours are the page's CSS variables, so that charts follow the theme.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from stages.report.exhibit import Exhibit
from stages.report.text import quantity, shown
from stages.verdict.gate import Gate
from stages.verdict.report import EvaluationReport

BASELINE = "fp16 baseline"
"""Prefix of the names of FP16 baselines. It differs from "fp16", because a policy may have that name."""
FLOOR = 1e-6
"""Smallest value on a logarithmic axis."""
LIMIT, FAINT = "var(--fail)", "var(--faint)"
VERDICTS = {
    "PASS": ("var(--pass)", "circle"),
    "INCONCLUSIVE": ("var(--inconclusive)", "square"),
    "FAIL": (LIMIT, "cross"),
    "baseline": (FAINT, "diamond"),
}
"""Verdict -> (colour, shape) of a point."""
SERIES = ("#3a86d4", "#d9772b", "#2a9d8f", "#c0569b", "#a08a1c", "#7d70ec", "#d1495b", "#5c9e3c")
"""Line colours with a contrast of at least 3 to 1 on the light and the dark background."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_TEXT = {"labelColor": FAINT, "titleColor": FAINT, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
LOOK = {
    "background": "transparent",
    "padding": 12,  # room for browsers with wider fonts
    "view": {"stroke": None},
    "axis": {**_TEXT, "titlePadding": 8, "gridColor": "var(--line)", "domainColor": "var(--line)", "tickColor": "var(--line)"},
    "legend": {**_TEXT, "orient": "top", "columns": 4, "labelLimit": 200},
    "header": {"labelColor": "var(--ink)", "labelFontSize": 13, "labelFontWeight": 600, "labelAnchor": "start"},
    "text": {"color": "var(--ink)", "fontSize": 12},
}

Datum = dict[str, Any]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A chart and a table of its numbers."""

    title: str
    note: str
    svg: Markup
    headings: list[str]
    rows: list[list[str]]
    """The first cell of a row is the policy's name."""


def draw_charts(exhibits: Sequence[Exhibit]) -> dict[str, Chart]:
    """Return chart name -> chart, without charts that have no data."""
    recovery, quality, context = recovery_numbers(exhibits), quality_numbers(exhibits), context_numbers(exhibits)
    charts: dict[str, tuple[str, str, Spec, Sequence[Datum], dict[str, str]]] = {}
    if recovery:
        charts["recovery"] = (
            "How much of the probability of right answers each policy keeps",
            "Dot: the probability of the right answers under the policy divided by the same under FP16. The line ends at the "
            "one-sided bound. All of it is to the right of the limit, the tick, if the policy passes.",
            recovery_spec(recovery),
            recovery,
            {"policy": "policy", "work": "place", "recovery": "value", "bound": "bound", "limit": "limit", "line": "verdict"},
        )
    if any(row["verdict"] != "baseline" for row in quality):
        charts["quality"] = (
            "How far each policy is from FP16, and how many bytes its cache takes",
            "Down and left is better. The line joins the policies that no other policy beats in both. Values below 1e−6 are "
            "drawn at 1e−6.",
            quality_spec(quality),
            quality,
            {"policy": "policy", "KiB/token": "kib", "mean KL": "exact", "limit": "limit", "on the front": "front"},
        )
    if context:
        charts["context"] = (
            "How far each policy is from FP16 as the context gets longer",
            "Mean KL of all questions with contexts of these lengths. The limit is on the mean of a whole workload.",
            context_spec(context, quality),
            context,
            {
                "policy": "policy",
                "context [tokens]": "context",
                "mean KL": "kl",
                "99th percentile": "p99",
                "samples": "samples",
            },
        )
    drawings = draw_svg([spec for _, _, spec, _, _ in charts.values()]) if charts else []
    return {
        name: Chart(
            title, note, Markup(svg), list(columns), [[_cell(row[field]) for field in columns.values()] for row in data]
        )
        for (name, (title, note, _, data, columns)), svg in zip(charts.items(), drawings, strict=True)
    }


def draw_svg(specs: Sequence[Spec]) -> list[str]:
    """Render Vega-Lite specifications as SVG. Vega escapes the texts.

    Vega runs in a process of its own: its threads would hang in every process that this one forks later.
    """
    script = (
        f"import sys; sys.path[:] = {sys.path!r}; import json, vl_convert; "
        "json.dump([vl_convert.vegalite_to_svg(spec) for spec in json.load(sys.stdin)], sys.stdout)"
    )
    asked = json.dumps([{"config": LOOK, **_cleaned(spec)} for spec in specs])
    drawn = subprocess.run([sys.executable, "-c", script], input=asked, capture_output=True, text=True, check=True)
    return [str(svg) for svg in json.loads(drawn.stdout)]


def _cleaned(value: Any) -> Any:
    """Return a specification with secrets and invisible characters removed from its texts."""
    if isinstance(value, dict):
        return {name: _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(inner) for inner in value]
    return shown(value) if isinstance(value, str) else value


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    return quantity(value) if isinstance(value, float | None) else str(value)


def _drawn(value: float | None) -> float | None:
    """Return a value for a logarithmic axis: at least FLOOR, with three significant digits; None if missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{max(value, FLOOR):.3g}")


def readable(exhibits: Sequence[Exhibit]) -> list[tuple[Exhibit, EvaluationReport]]:
    """Return (candidate, report) for candidates with a readable report."""
    return [(exhibit, exhibit.report) for exhibit in exhibits if exhibit.report is not None]


def baseline_names(exhibits: Sequence[Exhibit]) -> dict[str, str]:
    """Return digest -> display name of the baselines. If there are several, each is named after its first policy."""
    first = {exhibit.candidate.baseline.digest: exhibit.candidate.name for exhibit in reversed(exhibits)}
    return {digest: BASELINE if len(first) == 1 else f"{BASELINE} of {name}" for digest, name in reversed(first.items())}


def recovery_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's recovery: first for all questions, then by kind of work."""
    return [
        {"policy": exhibit.candidate.name, "verdict": check.status, "place": check.where}
        | {"value": check.value, "bound": check.bound, "limit": check.threshold}
        for exhibit in exhibits
        for check in exhibit.candidate.checks
        if check.gate == Gate.RECOVERY and check.value is not None and check.bound is not None
    ]


def quality_numbers(exhibits: Sequence[Exhibit]) -> list[Datum]:
    """Return each policy's mean KL and bytes per token, then each FP16 baseline with its A/A floor."""
    data: list[Datum] = []
    baselines: dict[str, EvaluationReport] = {}
    for exhibit, report in sorted(readable(exhibits), key=lambda pair: len(pair[0].rows)):
        baselines[exhibit.candidate.baseline.digest] = report
    for exhibit, report in readable(exhibits):
        whole = report.slice()
        if report.system.kib_per_token is None or whole is None:
            continue
        limit = next((check.threshold for check in exhibit.candidate.checks if check.gate == Gate.MEAN_KL), None)
        point = {"policy": exhibit.candidate.name, "verdict": exhibit.candidate.verdict, "kib": report.system.kib_per_token}
        data.append(point | {"exact": whole.fidelity.kl_mean, "distance": _drawn(whole.fidelity.kl_mean), "limit": limit})
    mark_front(data)
    for digest, name in baseline_names(exhibits).items():
        if digest in baselines:
            noise, system = baselines[digest].noise, baselines[digest].baseline_system
            exact = None if noise is None else noise.kl_mean
            point = {"policy": name, "verdict": "baseline", "kib": system.kib_per_token, "limit": None, "front": False}
            data.append(point | {"exact": exact, "distance": _drawn(exact) or FLOOR})
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
    for exhibit, report in readable(exhibits):
        for part in report.slices:
            if part.context is None or part.workload is not None:
                continue
            low, high = part.context
            tokens = [row.context_tokens for row in exhibit.rows if low <= row.context_tokens < (high or math.inf)]
            data.append(
                {
                    "policy": exhibit.candidate.name,
                    "samples": part.samples,
                    "tokens": sum(tokens) / len(tokens) if tokens else low,
                }
                | {"context": f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"}
                | {"kl": _drawn(part.fidelity.kl_mean), "p99": _drawn(part.fidelity.kl_p99)}
            )
    return data


def _number(field: str, title: str | None = None, **more: Any) -> Spec:
    """Return the Vega-Lite encoding of a numeric field."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def _logarithmic(field: str, title: str | None) -> Spec:
    return _number(field, title, scale={"type": "log"}, axis={"format": ".0e", "tickCount": 6})


def _verdict(channel: str) -> Spec:
    position = ("color", "shape").index(channel)
    scale = {"domain": list(VERDICTS), "range": [look[position] for look in VERDICTS.values()]}
    return {channel: {"field": "verdict", "type": "nominal", "title": None, "scale": scale}}


def _level(axis: Spec, value: float, label: str, colour: str, *, left: bool = False) -> Spec:
    """Return the layer of a labelled horizontal line."""
    x, align = (4, "left") if left else ("width", "right")
    text = {"type": "text", "align": align, "dy": -7, "color": colour}
    return {
        "data": {"values": [{"level": value, "label": label}]},
        "encoding": {"y": {**axis, "field": "level"}},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [7, 4], "color": colour}},
            {"mark": text, "encoding": {"x": {"value": x}, "text": {"field": "label"}}},
        ],
    }


def recovery_spec(data: list[Datum]) -> Spec:
    """Return a chart with a panel per policy and a row per kind of work."""
    x = _number("value", "recovery", scale={"zero": False, "nice": True}, axis={"format": ".0%", "tickCount": 4})
    places, policies = (list(dict.fromkeys(row[field] for row in data)) for field in ("place", "policy"))
    panel = {
        "width": 210,
        "height": {"step": 22},
        "encoding": {"y": {"field": "place", "type": "nominal", "sort": places, "title": None}},
        "layer": [
            {
                "transform": [{"calculate": "max(0, datum.bound)", "as": "low"}],
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6, "color": "var(--ink)"},
                "encoding": {"x": x, "x2": {"field": "low"}},
            },
            {"mark": {"type": "tick", "thickness": 2, "size": 16, "color": LIMIT}, "encoding": {"x": {**x, "field": "limit"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 90},
                "encoding": {"x": x, **_verdict("color"), **_verdict("shape")},
            },
        ],
    }
    facet = {"field": "policy", "type": "nominal", "sort": policies, "title": None}
    return {"data": {"values": data}, "facet": facet, "columns": 3, "spec": panel}


def quality_spec(data: list[Datum]) -> Spec:
    """Return a chart with a point per policy: its distance from FP16 over its cache's bytes per token."""
    x = _number("kib", "cache [KiB/token]", scale={"zero": False, "nice": True, "padding": 24}, axis={"tickCount": 8})
    y = _logarithmic("distance", "mean KL [nats/token]")
    limits = sorted({row["limit"] for row in data} - {None})
    floors = {row["distance"]: row["exact"] for row in data if row["verdict"] == "baseline" and row["exact"] is not None}
    line = {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "opacity": 0.6, "color": FAINT}
    names = (("datum.verdict !== 'baseline'", "left", 9), ("datum.verdict === 'baseline'", "right", -9))
    return {
        "data": {"values": data},
        "width": 780,
        "height": 340,
        "layer": [
            *(_level(y, limit, f"limit: at most {limit:.3g}", LIMIT) for limit in limits),
            *(_level(y, at, f"A/A floor: {exact:.1e}", FAINT, left=True) for at, exact in sorted(floors.items())),
            {"transform": [{"filter": "datum.front"}], "mark": line, "encoding": {"x": x, "y": y}},
            {
                "transform": [{"filter": "isValid(datum.distance)"}],
                "mark": {"type": "point", "filled": True, "size": 130},
                "encoding": {"x": x, "y": y, **_verdict("color"), **_verdict("shape")},
            },
            *(
                {
                    "transform": [{"filter": f"isValid(datum.distance) && {condition}"}],
                    "mark": {"type": "text", "align": align, "dx": dx, "dy": -8, "limit": 190},
                    "encoding": {"x": x, "y": y, "text": {"field": "policy"}},
                }
                for condition, align, dx in names
            ),
        ],
    }


def context_spec(data: list[Datum], quality: Sequence[Datum]) -> Spec:
    """Return a chart with a line per policy: its mean KL over the context length."""
    policies = list(dict.fromkeys(row["policy"] for row in data))
    colours = [SERIES[i % len(SERIES)] for i, _ in enumerate(policies)]
    dashes = [DASHES[(i // 2 + i // len(SERIES)) % len(DASHES)] for i, _ in enumerate(policies)]
    legend = {"title": None, "legend": {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3}}
    series = {
        channel: {"field": "policy", "type": "nominal", "scale": {"domain": policies, "range": values}, **legend}
        for channel, values in (("color", colours), ("strokeDash", dashes))
    }
    limits = sorted({row["limit"] for row in quality} - {None})
    y = _logarithmic("kl", "mean KL [nats/token]")
    return {
        "data": {"values": data},
        "width": 780,
        "height": 300,
        "layer": [
            {
                "transform": [{"filter": "isValid(datum.kl)"}],
                "mark": {"type": "line", "point": {"size": 50, "filled": True}, "strokeWidth": 2},
                "encoding": {
                    "x": _number("tokens", "context [tokens]", scale={"zero": False}),
                    "y": y,
                    **series,
                },
            },
            *(_level(y, limit, f"limit: {limit:.3g}", LIMIT) for limit in limits),
        ],
    }
