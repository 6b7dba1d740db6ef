"""The charts as Vega-Lite specifications, which the library draws: no chart is drawn by code of ours.

Every chart listens to the page's filters as parameters of its specification: `policy`, `workload` and, where it has several
figures to show, `measure`.
"""

from collections.abc import Sequence
from itertools import cycle

from stages.report.curves import MEASURES, Curves, Datum
from stages.report.panels import depth_panels, latency, rate
from stages.report.vega import CHOSEN, OF_WORKLOAD, Spec, chart, tooltip, where

VERDICTS = ("PASS", "INCONCLUSIVE", "FAIL", "baseline")
LIMIT, FAINT = "var(--fail)", "var(--faint)"
VERDICT_COLOURS = ("var(--pass)", "var(--inconclusive)", LIMIT, FAINT)
"""The page's own, which change with its theme."""
LEFT, RIGHT = {"x": 4, "align": "left"}, {"x": "width", "align": "right"}
VERDICT_SHAPES = ("circle", "square", "cross", "diamond")
SERIES = ("#3a86d4", "#d9772b", "#2a9d8f", "#c0569b", "#a08a1c", "#7d70ec", "#d1495b", "#5c9e3c")
"""Colours with a contrast of 3 to 1 at least on both of the page's backgrounds."""
LABEL = 190
"""Pixels of a policy's name beside its point; its tooltip has all of it."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])


def specifications(data: Curves, names: Sequence[str]) -> dict[str, Spec]:
    """Return the charts that there are numbers for, by name.

    Args:
        data: The numbers.
        names: The policies in their order.
    """
    drawn = {
        "quality": _quality(data.quality),
        "context": _context(data.context, data.dots, names, _lines(data.quality, LEFT)),
        "position": _position(data.position, names, _lines(data.quality, RIGHT)),
        "depth": depth_panels(data.depth, names),
        "depth_kl": depth_panels(data.depth, names, kl=True),
        "latency": latency(data.times),
        "rate": rate(data.times),
    }
    return {name: spec for name, spec in drawn.items() if spec is not None}


def _quality(data: list[Datum]) -> Spec | None:
    if not any(one["verdict"] != "baseline" for one in data):
        return None
    y = {**_kl("distance"), "title": None}
    shown = "{" + ", ".join(f"{measure}: '{title}'" for measure, (title, _) in MEASURES.items()) + "}[measure]"
    label = "'gate ' + {" + ", ".join(f"{m}: '{gate}'" for m, (_, gate) in MEASURES.items()) + "}[measure]"
    gate = [*where("isValid(datum.limit)"), {"aggregate": [{"op": "max", "field": "limit", "as": "limit"}]}]
    floor = where("datum.verdict === 'baseline'")
    faded = {"condition": {"test": f"{CHOSEN} || datum.verdict === 'baseline'", "value": 1}, "value": 0.25}
    limit = {"field": "limit", "type": "quantitative"}
    return chart(
        "Distance from FP16 over bytes of cache per token, a point for each policy. Lower and further left is better.",
        {"quality": data},
        height=360,
        title={"text": {"expr": shown}, "anchor": "start"},
        transform=where("datum.measure === measure", OF_WORKLOAD, "isValid(datum.distance)"),
        layer=[
            {"transform": gate, "mark": {"type": "rule", "strokeDash": [7, 4], "color": LIMIT}, "encoding": {"y": limit}},
            {
                "transform": [*gate, {"calculate": f"{label} + ': at most ' + format(datum.limit, '.3~g')", "as": "says"}],
                "mark": {"type": "text", "align": "right", "dy": -7, "color": LIMIT},
                "encoding": {"y": limit, "x": {"value": "width"}, "text": {"field": "says"}},
            },
            {
                "transform": floor,
                "mark": {"type": "rule", "strokeDash": [2, 3], "color": FAINT},
                "encoding": {"y": y},
            },
            {
                "transform": [
                    *floor,
                    {
                        "calculate": "'A/A floor: ' + (isValid(datum.exact) ? format(datum.exact, '.1~e') : 'not measured')",
                        "as": "says",
                    },
                ],
                "mark": {"type": "text", "align": "left", "dy": -7, "color": FAINT},
                "encoding": {"y": y, "x": {"value": 4}, "text": {"field": "says"}},
            },
            {
                "transform": where("datum.front"),
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "opacity": 0.6, "color": FAINT},
                "encoding": {"x": _kib(), "y": y},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 130},
                "encoding": {
                    "x": _kib(),
                    "y": y,
                    "color": {"field": "verdict", "scale": {"domain": VERDICTS, "range": VERDICT_COLOURS}, "title": None},
                    "shape": {"field": "verdict", "scale": {"domain": VERDICTS, "range": VERDICT_SHAPES}, "title": None},
                    "opacity": faded,
                    "tooltip": tooltip(policy="policy", verdict="verdict", kib="KiB/token", exact="distance", limit="gate"),
                },
            },
            *(
                {
                    "transform": where(f"datum.verdict {relation} 'baseline'"),
                    "mark": {"type": "text", "align": align, "dx": dx, "dy": -8, "limit": LABEL},
                    "encoding": {"x": _kib(), "y": y, "text": {"field": "policy"}, "opacity": faded},
                }
                for relation, align, dx in (("!==", "left", 9), ("===", "right", -9))
            ),
        ],
    )


def _kib() -> Spec:
    scale = {"zero": False, "nice": True, "padding": 24}
    axis = {"tickCount": 8}
    return {"field": "kib", "type": "quantitative", "title": "cache [KiB/token]", "scale": scale, "axis": axis}


def _coloured(names: Sequence[str]) -> Spec:
    """Return the encodings that tell policies apart: by colour, and by dashes."""
    colours = [colour for colour, _ in zip(cycle(SERIES), names, strict=False)]
    dashes = [DASHES[(i // 2 + i // len(SERIES)) % len(DASHES)] for i, _ in enumerate(names)]
    legend = {"title": None, "legend": {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3, "symbolOpacity": 1}}
    return {
        "color": {"field": "policy", "scale": {"domain": names, "range": colours}, **legend},
        "strokeDash": {"field": "policy", "scale": {"domain": names, "range": dashes}, **legend},
    }


def _kl(field: str = "kl") -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"type": "log"},
        "title": "KL [nats/token]",
        "axis": {"format": ".0e", "tickCount": 6},
    }


def _lines(quality: Sequence[Datum], says_floor: Spec) -> list[Spec]:
    """Return the layers of the gate on the mean KL, and of the floor: the distance of the FP16 engine from itself.

    Args:
        quality: The numbers of the chart that has both.
        says_floor: Where along the floor its label stands, and how it is aligned there.
    """
    of_kl = [one for one in quality if one["measure"] == "kl_mean"]
    limits = {one["limit"] for one in of_kl if one["limit"] is not None}
    floors = {one["distance"]: one["exact"] for one in of_kl if one["verdict"] == "baseline" and one["exact"] is not None}
    drawn = [(limit, f"gate max_mean_kl: {limit:.3g}", LIMIT, [7, 4], RIGHT) for limit in sorted(limits)]
    drawn += [(floor, f"A/A floor: {exact:.1e}", FAINT, [2, 3], says_floor) for floor, exact in sorted(floors.items())]
    return [
        {
            "data": {"values": [{"kl": value, "says": says}]},
            "encoding": {"y": _kl()},
            "layer": [
                {"mark": {"type": "rule", "strokeDash": dashes, "color": colour}},
                {
                    "mark": {"type": "text", "align": at["align"], "dy": -7, "color": colour},
                    "encoding": {"x": {"value": at["x"]}, "text": {"field": "says"}},
                },
            ],
        }
        for value, says, colour, dashes, at in drawn
    ]


def _context(data: list[Datum], dots: list[Datum], names: Sequence[str], lines: Sequence[Spec]) -> Spec | None:
    if not data:
        return None
    x = {"field": "tokens", "type": "quantitative", "title": "context [tokens]", "scale": {"zero": False}}
    only = "policy !== '' && datum.policy === policy"
    told = tooltip(
        policy="policy", workload="workload", tokens="mean context", kl="mean KL", p99="99th percentile", samples="samples"
    )
    return chart(
        "Mean KL by length of the context, a line for each policy.",
        {"bins": data, "dots": dots},
        height=300,
        layer=[
            {
                "data": {"name": "dots"},
                "transform": where(only, "workload === '' || datum.workload === workload"),
                "mark": {"type": "circle", "size": 18, "opacity": 0.45},
                "encoding": {"x": x, "y": _kl(), "color": _coloured(names)["color"]},
            },
            {
                "transform": where(CHOSEN, OF_WORKLOAD, "isValid(datum.kl)"),
                "mark": {"type": "line", "point": {"size": 55, "filled": True}, "strokeWidth": 2},
                "encoding": {"x": x, "y": _kl(), **_coloured(names), "tooltip": told},
            },
            *lines,
        ],
    )


def _position(data: list[Datum], names: Sequence[str], lines: Sequence[Spec]) -> Spec | None:
    if not data:
        return None
    x = {"field": "step", "type": "quantitative", "title": "decode step", "scale": {"type": "log", "base": 2}}
    told = tooltip(
        policy="policy",
        workload="workload",
        first="from step",
        last="to step",
        kl="mean KL",
        p95="95th percentile",
        tokens="tokens",
    )
    only = "policy !== '' && datum.policy === policy"
    return chart(
        "Mean KL by decode step, a line for each policy; the 95th percentile of the policy that is chosen is dotted.",
        {"steps": data},
        height=300,
        layer=[
            {
                "transform": where(only, OF_WORKLOAD, "isValid(datum.p95)"),
                "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [2, 3]},
                "encoding": {"x": x, "y": _kl("p95"), "color": _coloured(names)["color"]},
            },
            {
                "transform": where(CHOSEN, OF_WORKLOAD, "isValid(datum.kl)"),
                "mark": {"type": "line", "point": {"size": 45, "filled": True}, "strokeWidth": 2},
                "encoding": {"x": x, "y": _kl(), **_coloured(names), "tooltip": told},
            },
            *lines,
        ],
    )
