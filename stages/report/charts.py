"""The charts as Vega-Lite specifications in plain dictionaries, which the library draws.

Every chart listens to the page's filters as parameters of its specification: `policy`, `workload` and `measure`. A name that is
`policy` or `workload` in an expression is a filter, `datum.policy` is a field. Altair's classes would cost every evaluation two
seconds of imports; a test compiles each specification with the compiler that the page carries.
"""

from collections.abc import Sequence
from typing import Any

from stages.report.numbers import ALL, BASELINE, FLOOR, TITLES, Datum, Numbers

Spec = dict[str, Any]

CHOSEN = "(policy === '' || datum.policy === policy)"
ONLY = "policy !== '' && datum.policy === policy"
OF_WORKLOAD = "datum.workload === workload"
WITH_BASELINE = f"{CHOSEN} || indexof(datum.policy, '{BASELINE}') === 0"
"""Conditions of what is shown: of the policy and the workload that the page's filters ask for."""

LIMIT, FAINT = "var(--fail)", "var(--faint)"
VERDICTS = {
    "PASS": ("var(--pass)", "circle"),
    "INCONCLUSIVE": ("var(--inconclusive)", "square"),
    "FAIL": (LIMIT, "cross"),
    "baseline": (FAINT, "diamond"),
}
"""Colour, one of the page's own that change with its theme, and shape."""
LOOKS: Spec = {
    name: {"field": "verdict", "scale": {"domain": list(VERDICTS), "range": [v[i] for v in VERDICTS.values()]}, "title": None}
    for i, name in enumerate(("color", "shape"))
}
SERIES = ("#3a86d4", "#d9772b", "#2a9d8f", "#c0569b", "#a08a1c", "#7d70ec", "#d1495b", "#5c9e3c")
"""Colours with a contrast of 3 to 1 at least on both of the page's backgrounds."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
TEXTS = {"place", "policy", "verdict", "workload", "steps", "context", "depth"}
"""Fields that are no numbers."""


def specifications(data: Numbers, names: Sequence[str]) -> dict[str, Spec]:
    """Return the charts that there are numbers for, by name. `names` are the policies in their order."""
    kls = [one for one in data["depth"] if one["kl"] is not None]
    charts = {
        "recovery": _recovery(data["recovery"]) if data["recovery"] else None,
        "quality": _quality(data["quality"]) if any(one["verdict"] != "baseline" for one in data["quality"]) else None,
        "context": _context(data, names) if data["context"] else None,
        "position": _position(data, names) if data["position"] else None,
        "depth": _panels(data["depth"], RIGHT) if data["depth"] else None,
        "depth_kl": _panels(kls, FAR) if kls else None,
    }
    return {name: spec for name, spec in charts.items() if spec is not None}


def _chart(description: str, data: dict[str, list[Datum]], **rest: Any) -> Spec:
    """Return a specification that is as wide as its place."""
    params = {"policy": ALL, "workload": ALL, "measure": TITLES["max_mean_kl"]}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",  # a name, which nothing loads
        "description": description,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "datasets": data,
        "data": {"name": next(iter(data))},
        "params": [{"name": name, "value": value} for name, value in params.items()],
        **rest,
    }


def _where(*conditions: str) -> list[Spec]:
    return [{"filter": condition} for condition in conditions]


def _of(field: str, title: str | None = None, **more: Any) -> Spec:
    """Return the encoding of a number."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def _kl(field: str = "kl", title: str | None = "KL [nats/token]") -> Spec:
    return _of(field, title, scale={"type": "log"}, axis={"format": ".0e", "tickCount": 6})


def _tooltip(**fields: str) -> list[Spec]:
    """Return a tooltip from names of fields and what they are called; numbers with three digits."""
    return [
        {"field": field, "title": title} if field in TEXTS else _of(field, title, format=".3~g")
        for field, title in fields.items()
    ]


def _level(y: Spec, colour: str, dashes: list[int], at: Spec, **source: Any) -> Spec:
    """Return a level across a chart with its label, which is the field `says` of its source."""
    label = {"type": "text", "align": at["align"], "dy": -7, "color": colour}
    return {
        **source,
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": dashes, "color": colour}},
            {"mark": label, "encoding": {"x": {"value": at["x"]}, "text": {"field": "says"}}},
        ],
    }


AT_LEFT, AT_RIGHT = {"x": 4, "align": "left"}, {"x": "width", "align": "right"}


def _quality(data: list[Datum]) -> Spec:
    x = _of("kib", "cache [KiB/token]", scale={"zero": False, "nice": True, "padding": 24}, axis={"tickCount": 8})
    y = _kl("distance", None)
    limit = {"aggregate": [{"op": "max", "field": "limit", "as": "limit"}], "groupby": ["gate"]}
    gate = {"calculate": "'gate ' + datum.gate + ', documents capped: at most ' + format(datum.limit, '.3~g')", "as": "says"}
    exact = "(isValid(datum.exact) ? format(datum.exact, '.1~e') : 'not measured')"
    floor = {"calculate": f"'A/A floor: ' + {exact}", "as": "says"}
    of_baseline = "datum.verdict === 'baseline'"
    faded = {"condition": {"test": f"{CHOSEN} || {of_baseline}", "value": 1}, "value": 0.25}
    told = _tooltip(policy="policy", verdict="verdict", kib="KiB/token", exact="distance", limit="gate")
    front = {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "opacity": 0.6, "color": FAINT}
    point = {"type": "point", "filled": True, "size": 130}
    return _chart(
        "Distance from FP16 over bytes of cache per token, a point for each policy. Lower and further left is better.",
        {"quality": data},
        height=360,
        title={"text": {"expr": "measure"}, "anchor": "start"},
        transform=_where("datum.measure === measure", OF_WORKLOAD, "isValid(datum.distance)"),
        layer=[
            _level(_of("limit"), LIMIT, [7, 4], AT_RIGHT, transform=[*_where("isValid(datum.limit)"), limit, gate]),
            _level(y, FAINT, [2, 3], AT_LEFT, transform=[*_where(of_baseline), floor]),
            {"transform": _where("datum.front"), "mark": front, "encoding": {"x": x, "y": y}},
            {"mark": point, "encoding": {"x": x, "y": y, **LOOKS, "opacity": faded, "tooltip": told}},
            *(
                {
                    "transform": _where(condition),
                    "mark": {"type": "text", "align": align, "dx": dx, "dy": -8, "limit": 190},
                    "encoding": {"x": x, "y": y, "text": {"field": "policy"}, "opacity": faded},
                }
                for condition, align, dx in ((f"!({of_baseline})", "left", 9), (of_baseline, "right", -9))
            ),
        ],
    )


def _coloured(names: Sequence[str]) -> Spec:
    """Return the encodings that tell policies apart: by colour, and by dashes."""
    colours = [SERIES[i % len(SERIES)] for i, _ in enumerate(names)]
    dashes = [DASHES[(i // 2 + i // len(SERIES)) % len(DASHES)] for i, _ in enumerate(names)]
    legend = {"title": None, "legend": {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3, "symbolOpacity": 1}}
    return {
        "color": {"field": "policy", "scale": {"domain": names, "range": colours}, **legend},
        "strokeDash": {"field": "policy", "scale": {"domain": names, "range": dashes}, **legend},
    }


def _by_place(x: Spec, names: Sequence[str], data: Numbers, floor_at: Spec, tooltip: list[Spec], behind: Spec) -> list[Spec]:
    """Return the layers of a chart of the mean KL: policies' lines, the gate, and the FP16 engine's distance from itself."""
    of_kl = [one for one in data["quality"] if one["gate"] == "max_mean_kl"]
    limits = {one["limit"] for one in of_kl} - {None}
    floors = {one["distance"]: one["exact"] for one in of_kl if one["verdict"] == "baseline" and one["exact"] is not None}
    levels = [(limit, f"gate max_mean_kl, documents capped: {limit:.3g}", LIMIT, [7, 4], AT_RIGHT) for limit in sorted(limits)]
    levels += [(floor, f"A/A floor: {exact:.1e}", FAINT, [2, 3], floor_at) for floor, exact in sorted(floors.items())]
    line = {"type": "line", "point": {"size": 50, "filled": True}, "strokeWidth": 2}
    return [
        behind,
        {
            "transform": _where(CHOSEN, OF_WORKLOAD, "isValid(datum.kl)"),
            "mark": line,
            "encoding": {"x": x, "y": _kl(), **_coloured(names), "tooltip": tooltip},
        },
        *(
            _level(_kl(), colour, dashes, at, data={"values": [{"kl": value, "says": says}]})
            for value, says, colour, dashes, at in levels
        ),
    ]


def _context(data: Numbers, names: Sequence[str]) -> Spec:
    x = _of("tokens", "context [tokens]", scale={"zero": False})
    told = _tooltip(policy="policy", workload="workload", context="context", kl="mean KL", p99="99 %", samples="samples")
    dots = {
        "data": {"name": "dots"},
        "transform": _where(ONLY, f"workload === '' || {OF_WORKLOAD}"),
        "mark": {"type": "circle", "size": 18, "opacity": 0.45},
        "encoding": {"x": x, "y": _kl(), "color": _coloured(names)["color"]},
    }
    layers = _by_place(x, names, data, AT_LEFT, told, dots)
    description = "Mean KL by length of the context, a line for each policy."
    return _chart(description, {"bins": data["context"], "dots": data["dots"]}, height=300, layer=layers)


def _position(data: Numbers, names: Sequence[str]) -> Spec:
    x = _of("step", "decode step", scale={"type": "log", "base": 2})
    told = _tooltip(policy="policy", workload="workload", steps="steps", kl="mean KL", p95="95 %", tokens="tokens")
    tail = {
        "transform": _where(ONLY, OF_WORKLOAD, "isValid(datum.p95)"),
        "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [2, 3]},
        "encoding": {"x": x, "y": _kl("p95"), "color": _coloured(names)["color"]},
    }
    layers = _by_place(x, names, data, AT_RIGHT, told, tail)
    description = "Mean KL by decode step, a line for each policy; the 95th percentile of the policy that is chosen is dotted."
    return _chart(description, {"steps": data["position"]}, height=300, layer=layers)


RIGHT: Spec = {
    "description": "Share of right answers",
    "says": "datum.right + '/' + datum.judged",
    "light": "datum.share < 0.15 || datum.share > 0.85",
    "colour": _of(
        "share", "right answers", legend={"format": ".0%", "tickCount": 3}, scale={"scheme": "blueorange", "domain": [1, 0]}
    ),
}
FAR: Spec = {
    "description": "Mean KL",
    "says": "format(datum.kl, '.0e')",
    "light": "datum.kl > 0.05",
    "colour": _of("kl", "mean KL", legend={"format": ".0e"}, scale={"scheme": "oranges", "type": "log", "domain": [FLOOR, 10]}),
}


def _panels(data: list[Datum], shade: Spec) -> Spec:
    """Return a panel for each engine: depth of the answer by length of the prompt, shaded by right answers or by KL."""
    told = _tooltip(policy="engine", context="context", depth="depth", right="right", judged="of", kl="mean KL")
    light = {"condition": {"test": shade["light"], "value": "#ffffff"}, "value": "#111111"}
    axes = {
        channel: {"field": field, "type": "ordinal", "title": title, "axis": {"labelAngle": 0}}
        | {"sort": list(dict.fromkeys(one[field] for one in sorted(data, key=lambda one: one[order])))}
        for channel, field, title, order in (("x", "context", "context [tokens]", "low"), ("y", "depth", "depth", "order"))
    }
    panel = {
        "width": 230,
        "height": 150,
        "encoding": axes,
        "layer": [
            {"mark": {"type": "rect", "cornerRadius": 2}, "encoding": {"color": shade["colour"], "tooltip": told}},
            {
                "transform": [{"calculate": shade["says"], "as": "says"}],
                "mark": {"type": "text", "fontSize": 11},
                "encoding": {"text": {"field": "says"}, "color": light},
            },
        ],
    }
    said = f"{shade['description']} by depth of the answer in the prompt and length of the prompt, a panel for each engine."
    return _side_by_side(said, {"depths": data}, panel, WITH_BASELINE, OF_WORKLOAD)


def _recovery(data: list[Datum]) -> Spec:
    """Return a panel for each policy, a row for each kind of work: recovery, a line to its bound, a tick at its limit."""
    places = list(dict.fromkeys(one["place"] for one in data))
    x = _of("value", "recovery", scale={"zero": False, "nice": True}, axis={"format": ".0%", "tickCount": 4})
    told = _tooltip(policy="policy", place="work", value="recovery", bound="bound", limit="limit")
    limit = {"type": "tick", "thickness": 2, "size": 16, "color": LIMIT}
    panel = {
        "width": 230,
        "height": {"step": 22},
        "encoding": {"y": {"field": "place", "type": "nominal", "sort": places, "title": None}},
        "layer": [
            {
                "transform": [{"calculate": "max(0, datum.bound)", "as": "low"}],
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
                "encoding": {"x": x, "x2": {"field": "low"}},
            },
            {"mark": limit, "encoding": {"x": {**x, "field": "limit"}}},
            {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"x": x, **LOOKS, "tooltip": told}},
        ],
    }
    said = "Share of the probability of right answers that is kept, with its bound and limit, a panel for each policy."
    return _side_by_side(said, {"recoveries": data}, panel, CHOSEN, f"workload === '' || {OF_WORKLOAD}")


def _side_by_side(said: str, data: dict[str, list[Datum]], panel: Spec, *shown: str) -> Spec:
    """Return a panel for each engine, in the order of the data, of those that meet all conditions."""
    engines = list(dict.fromkeys(one["policy"] for some in data.values() for one in some))
    facet = {"field": "policy", "type": "nominal", "sort": engines, "title": None}
    panels = _chart(said, data, transform=_where(*shown), facet=facet, columns=3, spec=panel)
    return {key: value for key, value in panels.items() if key not in ("width", "autosize")}  # each panel has its own
