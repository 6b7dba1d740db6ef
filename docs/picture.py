"""Draws docs/picture.svg from docs/picture.json: `python docs/picture.py [SUMMARY.json]`; a summary gives new figures."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import vl_convert

from stages.report.charts import specifications
from stages.report.numbers import ALL, BASELINE, Datum

HERE = Path(__file__).resolve().parent
FIGURES, PICTURE = HERE / "picture.json", HERE / "picture.svg"
GATE, MEASURE = "min_recovery", "Share of the probability of right answers that is lost"
LEAST = 1e-3
"""Where an engine that loses nothing is drawn on the logarithmic axis."""
COLOURS = {"--pass": "#14692f", "--fail": "#b3202a", "--inconclusive": "#7d5700", "--faint": "#56606b"}
"""The report's own on a light page."""


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the picture shows of a summary.json: recovery and bytes of every quantized cache, and the command."""
    kept = ("quality/recovery", "memory/kib_per_token")
    rows = [
        {"policy": one["name"], "verdict": one["verdict"], **{name: round(one["metrics"][name], 5) for name in kept}}
        for one in summary["candidates"]
        if one["name"] != "fp16"
    ]
    return {"command": re.sub(r"^.* -m pipeline", "kvgate", summary["command"]), "limit": 0.95, "candidates": rows}


def data(shown: dict[str, Any], baseline_kib: float) -> list[Datum]:
    """Return the numbers of the report's chart on quality and bytes: what is lost of the probability of right answers."""
    rows = [
        {"policy": one["policy"], "verdict": one["verdict"], "kib": one["memory/kib_per_token"], "limit": 1 - shown["limit"]}
        | {"exact": 1 - one["quality/recovery"], "distance": max(1 - one["quality/recovery"], LEAST)}
        for one in shown["candidates"]
    ]
    for one in rows:
        one["front"] = not any(o["kib"] <= one["kib"] and o["distance"] < one["distance"] for o in rows)
    rows.append({"policy": BASELINE, "verdict": "baseline", "kib": baseline_kib, "limit": None, "exact": 0, "distance": LEAST})
    return [{"workload": ALL, "measure": MEASURE, "gate": GATE, "front": False} | one for one in rows]


def svg(shown: dict[str, Any]) -> str:
    """Return the picture."""
    numbers = {"quality": data(shown, shown["baseline_kib"])}
    empty = {name: [] for name in ("recovery", "context", "dots", "position", "depth", "times")}
    text = json.dumps(specifications({**empty, **numbers}, [one["policy"] for one in shown["candidates"]])["quality"])
    for name, colour in COLOURS.items():
        text = text.replace(f"var({name})", colour)
    spec = json.loads(text.replace('"format": ".0e"', '"format": ".1%"'))
    (measure,) = (one for one in spec["params"] if one["name"] == "measure")
    measure["value"] = MEASURE
    return str(vl_convert.vegalite_to_svg(spec | {"width": 720, "height": 320, "background": "white", "padding": 8}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        kib = summary["candidates"][0]["metrics"]["baseline/kib_per_token"]
        FIGURES.write_text(json.dumps(figures(summary) | {"baseline_kib": kib}, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(svg(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
