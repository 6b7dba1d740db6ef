"""Draws the two pictures of the documentation: `python docs/picture.py [SUMMARY.json ...]`.

picture.svg shows docs/picture.json, for which summaries of sweeps give new figures. lengths.svg shows a results file of the
benchmarks.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from stages.report import charts
from stages.report.charts import Datum, Spec, draw_svg

HERE = Path(__file__).resolve().parent
FIGURES, PICTURE = HERE / "picture.json", HERE / "picture.svg"
LENGTHS, LENGTHS_PICTURE = HERE.parent / "benchmarks" / "results" / "long_smollm2.json", HERE / "lengths.svg"
LEAST = 1e-3
"""Lowest position on the logarithmic axis."""
PADDING = {"left": 20, "top": 8, "right": 16, "bottom": 8}
"""Pixels; the sides have room for fonts that are wider than the font of the layout."""
COLOURS = {
    "--pass": "#14692f", "--fail": "#b3202a", "--inconclusive": "#7d5700", "--faint": "#56606b", "--ink": "#1b2026",
    "--line": "#d5dbe1",
}  # fmt: skip
"""Colours of the report on a light page."""
SYMBOLS = {"PASS": ("--pass", "circle"), "INCONCLUSIVE": ("--inconclusive", "square"), "FAIL": ("--fail", "cross")}
"""Verdict -> colour and shape of its marks, as in the report."""


def figures(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the picture's figures from summaries of sweeps: recovery with its bound, and bytes, of every quantized cache."""
    rows = {one["name"]: _figure(one) for summary in summaries for one in summary["candidates"] if one["name"] != "fp16"}
    return {
        "commands": [re.sub(r"^.* -m pipeline", "kvgate", each["command"].partition(" workdir=")[0]) for each in summaries],
        "limit": 0.95,
    } | {"candidates": [rows[name] for name in sorted(rows)]}


def _figure(candidate: dict[str, Any]) -> dict[str, Any]:
    """Return a candidate's figures; the bound is the one-sided bound that decided `min_recovery` over all questions."""
    (check,) = [one for one in candidate["checks"] if (one["gate"], one["where"]) == ("min_recovery", "all")]
    numbers = {name: candidate["metrics"][name] for name in ("quality/recovery", "memory/kib_per_token")}
    numbers["quality/recovery_bound"] = check["bound"]
    return {"policy": candidate["name"], "verdict": candidate["verdict"]} | {key: round(n, 5) for key, n in numbers.items()}


def losses(shown: dict[str, Any]) -> list[Datum]:
    """Return each cache's lost probability of right answers, with the bound that decides, and its bytes."""
    return [
        {"policy": one["policy"], "verdict": one["verdict"], "kib": one["memory/kib_per_token"], "limit": 1 - shown["limit"]}
        | {"loss": max(1 - one["quality/recovery"], LEAST), "bound": max(1 - one["quality/recovery_bound"], LEAST)}
        for one in shown["candidates"]
    ]


def loss_chart() -> dict[str, Any]:
    """Return the Vega-Lite specification of picture.svg."""
    loss = {"field": "loss", "type": "quantitative", "title": "lost probability of right answers", "scale": {"type": "log"}}
    limit = {"x": None, "y": {"field": "limit", "type": "quantitative"}}
    text = "'limit: at most ' + format(datum.limit, '.0%')"
    return {
        "width": 780,
        "height": 340,
        "encoding": {
            "x": {"field": "kib", "type": "quantitative", "title": "cache [KiB/token]"}
            | {"scale": {"zero": False, "nice": False, "padding": 72}, "axis": {"tickCount": 8}},
            "y": loss | {"axis": {"format": ".1~%", "values": [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]}},
        },
        "layer": [
            {
                "transform": [{"aggregate": [], "groupby": ["limit"]}, {"calculate": text, "as": "label"}],
                "encoding": limit,
                "layer": [
                    {"mark": {"type": "rule", "strokeDash": [7, 4], "color": "var(--fail)"}},
                    {
                        "mark": {"type": "text", "align": "left", "dy": -7, "color": "var(--fail)"},
                        "encoding": {"x": {"value": 4}, "text": {"field": "label"}},
                    },
                ],
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6, "color": "var(--ink)"},
                "encoding": {"y2": {"field": "bound"}},
            },
            {
                "mark": {"type": "tick", "orient": "horizontal", "thickness": 2, "size": 12, "color": "var(--ink)"},
                "encoding": {"y": {"field": "bound", "type": "quantitative"}},
            },
            *(
                {
                    "transform": [{"filter": f"datum.verdict {sign} 'FAIL'"}],
                    "mark": {"type": "text", "align": "left", "dx": 10, "dy": below, "limit": 190},
                    "encoding": {"text": {"field": "policy"}},
                }
                for sign, below in (("!==", -8), ("===", 17))  # a FAIL's label would hide the next whisker
            ),
            {"mark": {"type": "point", "filled": True, "size": 130}},
        ],
    }


def lengths(measured: dict[str, Any]) -> list[Datum]:
    """Return the numbers of the report's chart on recovery, by length and over all lengths.

    The results file has no bound over all lengths, so that point has no line.
    """
    return [
        {"policy": one["kv"], "place": place, "verdict": verdict, "value": value, "bound": bound, "limit": limit}
        for one in measured["results"]
        for place, verdict, value, bound, limit in [
            *(
                (f"{at['length']:,} (limit 80%)", at["status"], at["recovery"], at["bound"], at["limit"])
                for at in one["lengths"]
            ),
            ("all (limit 95%)", one["verdict"], one["recovery"], one["recovery"], 0.95),
        ]
    ]


def draw(chart: Spec, config: dict[str, Any], rows: list[Datum]) -> str:
    """Return a chart as SVG, on white. Its last layer, the points, shows only the verdicts that occur."""
    occurring = [verdict for verdict in SYMBOLS if any(row["verdict"] == verdict for row in rows)]
    field = {"field": "verdict", "type": "nominal", "title": None}
    colours, shapes = zip(*(SYMBOLS[verdict] for verdict in occurring), strict=True)
    marks = {
        "color": field | {"scale": {"domain": occurring, "range": [f"var({colour})" for colour in colours]}},
        "shape": field | {"scale": {"domain": occurring, "range": list(shapes)}},
    }
    chart.get("spec", chart)["layer"][-1]["encoding"] = marks
    (drawn,) = draw_svg([{**chart, "config": config | {"background": "white", "padding": PADDING}, "data": {"values": rows}}])
    return re.sub(r"var\((--\w+)\)", lambda found: COLOURS[found[1]], drawn)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        summaries = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
        FIGURES.write_text(json.dumps(figures(summaries), indent=1) + "\n", encoding="utf-8")
    shown, measured = (json.loads(path.read_text(encoding="utf-8")) for path in (FIGURES, LENGTHS))
    of_report = yaml.safe_load(Path(charts.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    PICTURE.write_text(draw(loss_chart(), of_report["config"], losses(shown)), encoding="utf-8")
    LENGTHS_PICTURE.write_text(draw(of_report["recovery"], of_report["config"], lengths(measured)), encoding="utf-8")
