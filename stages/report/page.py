"""report.html: one HTML file with an embedded style and without scripts, which loads no other file."""

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.core.files import write_whole
from stages.report.answers import MOST_ANSWERS, changed_answers
from stages.report.charts import draw_charts
from stages.report.exhibit import BASELINE, Exhibit, Occasion
from stages.report.text import quantity, shown
from stages.verdict.candidate import Candidate

HERE = Path(__file__).parent
MOST_POLICIES = 16
"""Maximum number of policies that are shown in full. Other policies appear only in the overview."""


def make_page(exhibits: Sequence[Exhibit], occasion: Occasion) -> dict[str, Any]:
    """Return the variables of the page's template."""
    first = sorted(exhibits, key=lambda e: (e.candidate.name != occasion.champion, e.candidate.verdict != "PASS"))
    full = [exhibit for exhibit in exhibits if exhibit in first[:MOST_POLICIES]]
    return {
        "occasion": occasion,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lead": _lead([exhibit.candidate for exhibit in exhibits], occasion.champion),
        "rows": list(_overview(exhibits, occasion)),
        "charts": draw_charts(full),
        "engines": [(exhibit, *changed_answers(exhibit, MOST_ANSWERS // max(1, len(full)))) for exhibit in full],
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


def write_page(path: Path, exhibits: Sequence[Exhibit], occasion: Occasion) -> Path:
    """Write the page atomically; return `path`."""
    write_whole(path, render(exhibits, occasion))
    return path


def render(exhibits: Sequence[Exhibit], occasion: Occasion) -> str:
    """Return the page as HTML."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
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
        policy_of_content=f"default-src 'none'; style-src 'sha256-{digest}'; style-src-attr 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'",
        style=Markup(style),
    )


def _clean(value: object) -> object:
    """Remove secrets and invisible characters from a value if it is a text of unknown origin."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value
