"""Draws the two pictures of the documentation: `python docs/picture.py [SUMMARY.json]`.

picture.svg shows docs/picture.json, for which a summary gives new figures; lengths.svg shows a results file of the benchmarks.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from stages.report import charts
from stages.report.charts import BASELINES, Datum, draw_svg, mark_front

HERE = Path(__file__).resolve().parent
FIGURES, PICTURE = HERE / "picture.json", HERE / "picture.svg"
LENGTHS, LENGTHS_PICTURE = HERE.parent / "benchmarks" / "results" / "long_smollm2.json", HERE / "lengths.svg"
LEAST = 1e-3
"""Position on the logarithmic axis of an engine that loses nothing."""
COLOURS = {
    "--pass": "#14692f", "--fail": "#b3202a", "--inconclusive": "#7d5700", "--faint": "#56606b", "--ink": "#1b2026",
    "--line": "#d5dbe1",
}  # fmt: skip
"""Colours of the report on a light page."""
WORDS = {
    "format: .0e": "format: .1%",
    "mean KL [nats/token]": "lost probability of right answers",
    "'noise floor: ' + format(datum.exact, '.1e')": "'FP16 (0 %)'",
    "format(datum.limit, '.3~g')": "format(datum.limit, '.0%')",
}
"""Text of the report's chart -> text of the picture."""


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the picture's figures from a summary.json: recovery and bytes of every quantized cache, and the command."""
    kept = ("quality/recovery", "memory/kib_per_token")
    rows = [
        {"policy": one["name"], "verdict": one["verdict"], **{name: round(one["metrics"][name], 5) for name in kept}}
        for one in summary["candidates"]
        if one["name"] != "fp16"
    ]
    return {"command": re.sub(r"^.* -m pipeline", "kvgate", summary["command"]), "limit": 0.95, "candidates": rows}


def data(shown: dict[str, Any]) -> list[Datum]:
    """Return the numbers of the report's chart on quality and bytes, with the lost recovery as the distance."""
    rows = [
        {"policy": one["policy"], "verdict": one["verdict"], "kib": one["memory/kib_per_token"], "limit": 1 - shown["limit"]}
        | {"exact": 1 - one["quality/recovery"], "distance": max(1 - one["quality/recovery"], LEAST)}
        for one in shown["candidates"]
    ]
    mark_front(rows)
    baseline = {"policy": BASELINES, "verdict": "baseline", "kib": shown["baseline_kib"], "limit": None, "front": False}
    return [*rows, baseline | {"exact": 0, "distance": LEAST}]


def lengths(measured: dict[str, Any]) -> list[Datum]:
    """Return the numbers of the report's chart on recovery, by length."""
    return [
        {"policy": one["kv"], "place": f"{at['length']:,} tokens", "verdict": at["status"], "value": at["recovery"]}
        | {"bound": at["bound"], "limit": at["limit"]}
        for one in measured["results"]
        for at in one["lengths"]
    ]


def draw(chart: str, rows: list[Datum], words: dict[str, str]) -> str:
    """Return a chart of the report as SVG, with some of its words replaced."""
    text = Path(charts.__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    for of_report, of_picture in words.items():
        assert of_report in text, of_report
        text = text.replace(of_report, of_picture)
    specs = yaml.safe_load(text)
    config = specs["config"] | {"background": "white", "padding": 8}
    (drawn,) = draw_svg([specs[chart] | {"config": config, "data": {"values": rows}}])
    return re.sub(r"var\((--\w+)\)", lambda found: COLOURS[found[1]], drawn)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        kib = summary["candidates"][0]["metrics"]["baseline/kib_per_token"]
        FIGURES.write_text(json.dumps(figures(summary) | {"baseline_kib": kib}, indent=1) + "\n", encoding="utf-8")
    shown, measured = (json.loads(path.read_text(encoding="utf-8")) for path in (FIGURES, LENGTHS))
    PICTURE.write_text(draw("quality", data(shown), WORDS), encoding="utf-8")
    LENGTHS_PICTURE.write_text(draw("recovery", lengths(measured), {}), encoding="utf-8")
