"""report.html: one HTML file with embedded style and script, which loads no other file.

The page begins with an overview of the engines and has a matrix of all checks.
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.core.files import write_whole
from stages.report.answers import changed_answers
from stages.report.charts import draw_charts
from stages.report.exhibit import BASELINE, Exhibit, Occasion
from stages.report.text import quantity, shown
from stages.verdict.candidate import Candidate
from stages.verdict.thresholds import Check, Gate, LineStatus

HERE = Path(__file__).parent
MOST_POLICIES = 16
"""Maximum number of policies that are shown in full. Other policies appear only in the overview."""
WORST: tuple[LineStatus, ...] = ("PASS", "WARNING", "INCONCLUSIVE", "FAIL")
"""Statuses from best to worst."""


@dataclass(frozen=True)
class GateRow:
    """A row of the matrix: a gate's worst check per policy, and all its checks by place."""

    gate: Gate
    worst: tuple[Check | None, ...]
    """The worst check per policy; None if the gate did not judge the policy."""
    counts: tuple[str, ...]
    """Number of passed checks per policy, for example "3 of 4"."""
    places: list[tuple[str, str | None, tuple[Check | None, ...]]]
    """(place, the workload that the place belongs to or None, check per policy)."""


def make_page(exhibits: Sequence[Exhibit], occasion: Occasion) -> dict[str, Any]:
    """Return the variables of the page's template."""
    first = sorted(exhibits, key=lambda e: (e.candidate.name != occasion.champion, e.candidate.verdict != "PASS"))
    full = [exhibit for exhibit in exhibits if exhibit in first[:MOST_POLICIES]]
    workloads = list(dict.fromkeys(row.workload for exhibit in full for row in exhibit.rows))
    return {
        "occasion": occasion,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lead": _lead([exhibit.candidate for exhibit in exhibits], occasion.champion),
        "rows": list(_overview(exhibits, occasion)),
        "policies": [exhibit.candidate for exhibit in full],
        "workloads": workloads,
        "gates": list(_gates(full, workloads)),
        "charts": draw_charts(full),
        "answers": changed_answers(full),
        "engines": full,
    }


def _lead(candidates: Sequence[Candidate], champion: str | None) -> str:
    words = {"PASS": "held up", "INCONCLUSIVE": "not decided", "FAIL": "failed"}
    counts = {status: sum(c.verdict == status for c in candidates) for status in words}
    told = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    noun = "KV cache" if len(candidates) == 1 else "KV caches"
    first = next((c for c in candidates if c.name == champion or len(candidates) == 1), None)
    keeps = f" {first.name} {first.kept}." if first is not None and first.kept is not None else ""
    return f"{len(candidates)} {noun} judged against FP16 on the decode path: {told}.{keeps}"


def _overview(exhibits: Sequence[Exhibit], occasion: Occasion) -> Iterator[dict[str, Any]]:
    """Yield the rows of the overview: the compared engines, and why a candidate does or does not serve."""
    candidates = {exhibit.candidate.name: exhibit.candidate for exhibit in exhibits}
    for name, verdict, *cells in occasion.overview[1:]:
        row: dict[str, Any] = {"name": name, "verdict": None, "champion": False, "note": "", "cells": cells}
        if verdict != BASELINE:
            judged = candidates[name]
            reason = judged.reasons[0] if verdict != "PASS" and judged.reasons else judged.covered or ""
            row |= {"verdict": verdict, "champion": name == occasion.champion, "note": occasion.passed_over.get(name) or reason}
        yield row


def _gates(exhibits: Sequence[Exhibit], workloads: Sequence[str]) -> Iterator[GateRow]:
    """Yield the rows of the matrix. Gates and places keep the order of the verdicts."""
    tables = [{(check.gate, check.where): check for check in exhibit.candidate.checks} for exhibit in exhibits]
    places: dict[Gate, dict[str, None]] = {}
    for key, where in (place for table in tables for place in table):
        places.setdefault(key, {})[where] = None
    for key, wheres in places.items():
        found = [(where, _workload(where, workloads), tuple(table.get((key, where)) for table in tables)) for where in wheres]
        columns = [
            [check for check in column if check is not None] for column in zip(*(checks for *_, checks in found), strict=True)
        ]
        worst = (max(c, key=lambda check: WORST.index(check.status), default=None) for c in columns)
        counts = (f"{sum(check.status == 'PASS' for check in c)} of {len(c)}" if c else "" for c in columns)
        yield GateRow(key, tuple(worst), tuple(counts), found)


def _workload(where: str, workloads: Sequence[str]) -> str | None:
    """Return the workload of a place such as `copy`, `copy [0, 256)` or `copy, drafts by lookup`; otherwise None."""
    return next((name for name in workloads if where == name or where.startswith((f"{name} [", f"{name}, "))), None)


def write_page(path: Path, exhibits: Sequence[Exhibit], occasion: Occasion) -> Path:
    """Write the page atomically; return `path`."""
    write_whole(path, render(exhibits, occasion))
    return path


def render(exhibits: Sequence[Exhibit], occasion: Occasion) -> str:
    """Return the page as HTML."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = quantity
    return environment.get_template("page.jinja").render(
        **make_page(exhibits, occasion),
        # The charts need `style` attributes. Under this policy they cannot load anything.
        policy_of_content=f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
    )


def _clean(value: object) -> object:
    """Remove secrets and invisible characters from a value if it is a text of unknown origin."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
