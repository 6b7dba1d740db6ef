"""The charts that compare engines beside the baseline: panels by depth and length, times between tokens, throughput."""

from collections.abc import Sequence

from stages.report.curves import BASELINE, FLOOR, Datum
from stages.report.vega import OF_WORKLOAD, WITH_BASELINE, Spec, chart, tooltip, where


def _shares() -> Spec:
    colour = {"field": "share", "type": "quantitative", "title": "right answers", "legend": {"format": ".0%", "tickCount": 3}}
    return {
        "says": "datum.right + '/' + datum.judged",
        "light": "datum.share < 0.15 || datum.share > 0.85",
        "colour": colour | {"scale": {"scheme": "blueorange", "domain": [1, 0]}},
        "description": "Share of right answers",
    }


def _kls() -> Spec:
    colour = {"field": "kl", "type": "quantitative", "title": "mean KL", "legend": {"format": ".0e"}}
    return {
        "says": "format(datum.kl, '.0e')",
        "light": "datum.kl > 0.05",
        "colour": colour | {"scale": {"scheme": "oranges", "type": "log", "domain": [FLOOR, 10]}},
        "description": "Mean KL",
    }


def depth_panels(data: list[Datum], names: Sequence[str], *, kl: bool = False) -> Spec | None:
    """Return a panel for each engine: depth of the answer by length of the prompt, shaded by right answers or by KL."""
    data = [one for one in data if one["kl"] is not None] if kl else data
    if not data:
        return None
    shade = _kls() if kl else _shares()
    panels = chart(
        f"{shade['description']} by depth of the answer in the prompt and length of the prompt, a panel for each engine.",
        {"depths": data},
        transform=where(WITH_BASELINE, OF_WORKLOAD),
        facet={"field": "policy", "type": "nominal", "sort": [BASELINE, *names], "title": None},
        columns=3,
        spec={
            "width": 230,
            "height": 150,
            "encoding": {
                "x": _bins("context", "context [tokens]", sorted(data, key=lambda one: one["low"])),
                "y": _bins("depth", "depth", sorted(data, key=lambda one: one["order"])),
            },
            "layer": [
                {
                    "mark": {"type": "rect", "cornerRadius": 2},
                    "encoding": {
                        "color": shade["colour"],
                        "tooltip": tooltip(
                            policy="engine", context="context", depth="depth", right="right", judged="of", kl="mean KL"
                        ),
                    },
                },
                {
                    "transform": [{"calculate": shade["says"], "as": "says"}],
                    "mark": {"type": "text", "fontSize": 11},
                    "encoding": {
                        "text": {"field": "says"},
                        "color": {"condition": {"test": shade["light"], "value": "#ffffff"}, "value": "#111111"},
                    },
                },
            ],
        },
    )
    del panels["width"], panels["autosize"]  # each panel of a facet has its own
    return panels


def _bins(field: str, title: str, ordered: Sequence[Datum]) -> Spec:
    names = list(dict.fromkeys(one[field] for one in ordered))
    return {"field": field, "type": "ordinal", "sort": names, "title": title, "axis": {"labelAngle": 0}}


def _engines(data: Sequence[Datum]) -> Spec:
    return {"field": "policy", "type": "nominal", "sort": [one["policy"] for one in data], "title": None}


def latency(data: list[Datum]) -> Spec | None:
    """Return the spread of the time between tokens."""
    timed = [one for one in data if one["p50"] is not None]
    if not timed:
        return None
    y, told = _engines(timed), tooltip(policy="engine", p50="median [ms]", p95="95 % [ms]", p99="99 % [ms]")
    x = {"field": "p50", "type": "quantitative", "title": "time between tokens [ms]", "scale": {"zero": True}}
    return chart(
        "Time between tokens of each engine: the median, and a line up to the 99th percentile with a tick at the 95th.",
        {"times": timed},
        height=30 * len(timed),
        transform=where(WITH_BASELINE),
        layer=[
            {"mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6}, "encoding": {"x": x, "x2": {"field": "p99"}, "y": y}},
            {"mark": {"type": "tick", "thickness": 2, "size": 14}, "encoding": {"x": {**x, "field": "p95"}, "y": y}},
            {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"x": x, "y": y, "tooltip": told}},
        ],
    )


def rate(data: list[Datum]) -> Spec | None:
    """Return the throughput."""
    timed = [one for one in data if one["rate"] is not None]
    if not timed:
        return None
    y, told = _engines(timed), tooltip(policy="engine", rate="tokens/s", slow="slow steps", fast="fast steps")
    room = {"domainMax": 1.15 * max(max(one["rate"], one["fast"] or 0) for one in timed), "nice": False}
    x: Spec = {"field": "rate", "type": "quantitative", "title": "decode [tokens/s]", "scale": room, "axis": {"tickCount": 5}}
    return chart(
        "Decoded tokens per second of each engine; nine decode steps in ten are as fast as its line.",
        {"rates": timed},
        height=30 * len(timed),
        transform=where(WITH_BASELINE),
        layer=[
            {"mark": {"type": "bar", "height": 14, "opacity": 0.8}, "encoding": {"x": x, "y": y, "tooltip": told}},
            {
                "transform": where("isValid(datum.slow) && isValid(datum.fast)"),
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"x": {**x, "field": "slow"}, "x2": {"field": "fast"}, "y": y},
            },
            {
                "transform": [
                    {"calculate": "isValid(datum.fast) ? max(datum.rate, datum.fast) : datum.rate", "as": "end"},
                    {"calculate": "format(datum.rate, ',.0f')", "as": "says"},
                ],
                "mark": {"type": "text", "align": "left", "dx": 5},
                "encoding": {"x": {**x, "field": "end"}, "y": y, "text": {"field": "says"}},
            },
        ],
    )
