"""Draws docs/picture.svg from docs/picture.json: `python docs/picture.py [SUMMARY.json]`; a summary gives new figures."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from stages.report import charts
from stages.report.charts import BASELINES, Datum, draw_svg, mark_front

HERE = Path(__file__).resolve().parent
FIGURES, PICTURE = HERE / "picture.json", HERE / "picture.svg"
LEAST = 1e-3
"""Where the logarithmic axis shows an engine that loses nothing."""
COLOURS = {
    "--pass": "#14692f", "--fail": "#b3202a", "--inconclusive": "#7d5700", "--faint": "#56606b", "--ink": "#1b2026",
    "--line": "#d5dbe1",
}  # fmt: skip
"""The report's own on a light page."""
WORDS = {
    '"format": ".0e"': '"format": ".1%"',
    "mean KL [nats/token]": "lost probability of right answers",
    "'A/A floor: ' + format(datum.exact, '.1e')": "'FP16'",
    "format(datum.limit, '.3~g')": "format(datum.limit, '.0%')",
}
"""Text of the report's chart -> text of the picture."""


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the picture shows of a summary.json: recovery and bytes of every quantized cache, and the command."""
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


def draw(shown: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    text = Path(charts.__file__).with_suffix(".json").read_text(encoding="utf-8")
    for of_report, of_picture in WORDS.items():
        text = text.replace(of_report, of_picture)
    specs = json.loads(text)
    config = specs["config"] | {"background": "white", "padding": 8}
    (drawn,) = draw_svg([specs["quality"] | {"config": config, "data": {"values": data(shown)}}])
    return re.sub(r"var\((--\w+)\)", lambda found: COLOURS[found[1]], drawn)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        kib = summary["candidates"][0]["metrics"]["baseline/kib_per_token"]
        FIGURES.write_text(json.dumps(figures(summary) | {"baseline_kib": kib}, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
