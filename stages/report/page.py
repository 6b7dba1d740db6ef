"""report.html: one HTML file with an embedded style and without scripts, which loads no other file."""

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.core.files import write_atomically
from stages.core.records import Sample
from stages.report.charts import draw_charts
from stages.report.exhibit import BASELINE, Exhibit, Occasion, quantity, shown
from stages.verdict.candidate import Candidate
from stages.verdict.report import SampleRow

MAX_ANSWERS = 200
"""Maximum number of shown answers, over all policies."""
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 2_000, 1_000
HERE = Path(__file__).parent
MAX_POLICIES = 16
"""Maximum number of policies that are shown in full. Other policies appear only in the overview."""


def make_page(exhibits: Sequence[Exhibit], occasion: Occasion) -> dict[str, Any]:
    first = sorted(exhibits, key=lambda e: (e.candidate.name != occasion.champion, e.candidate.verdict != "PASS"))
    full = [exhibit for exhibit in exhibits if exhibit in first[:MAX_POLICIES]]
    return {
        "occasion": occasion,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lead": _lead([exhibit.candidate for exhibit in exhibits], occasion.champion),
        "rows": list(_overview(exhibits, occasion)),
        "charts": draw_charts(full),
        "engines": [(exhibit, *changed_answers(exhibit, MAX_ANSWERS // max(1, len(full)))) for exhibit in full],
    }


def _lead(candidates: Sequence[Candidate], champion: str | None) -> str:
    words = {"PASS": "passed", "INCONCLUSIVE": "inconclusive", "FAIL": "failed"}
    counts = {status: sum(c.verdict == status for c in candidates) for status in words}
    counted = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    noun = "KV cache" if len(candidates) == 1 else "KV caches"
    first = next((c for c in candidates if c.name == champion or len(candidates) == 1), None)
    keeps = f" {first.name} {first.kept}." if first is not None and first.kept is not None else ""
    leaves = f" Left open: {first.caveat}." if first is not None and first.caveat is not None else ""
    return f"{len(candidates)} {noun} judged against FP16 on the decode path: {counted}.{keeps}{leaves}"


def _overview(exhibits: Sequence[Exhibit], occasion: Occasion) -> Iterator[dict[str, Any]]:
    """Yield the rows of the overview: the compared engines, and why a candidate does or does not serve."""
    candidates = {exhibit.candidate.name: exhibit.candidate for exhibit in exhibits}
    for name, verdict, *cells in occasion.overview[1:]:
        row: dict[str, Any] = {"name": name, "verdict": None, "champion": False, "note": "", "cells": cells}
        if verdict != BASELINE:
            judged = candidates[name]
            passed = "; ".join(filter(None, (judged.covered, judged.caveat)))
            reason = judged.reasons[0] if verdict != "PASS" and judged.reasons else passed
            row |= {"verdict": verdict, "champion": name == occasion.champion, "note": occasion.passed_over.get(name) or reason}
        yield row


def write_page(path: Path, exhibits: Sequence[Exhibit], occasion: Occasion) -> Path:
    """Write the page atomically; return `path`."""
    write_atomically(path, render(exhibits, occasion))
    return path


def render(exhibits: Sequence[Exhibit], occasion: Occasion) -> str:
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


@dataclass(frozen=True)
class ChangedAnswer:
    """An answer that is right with FP16 and wrong with the policy ("lost"), or the reverse ("gained")."""

    row: SampleRow
    prompt: list[tuple[str, str]]
    """(role, text) per message; empty if the prompt is unknown."""
    reference: str
    before: str
    after: str

    @property
    def kind(self) -> str:
        return "lost" if self.row.baseline_correct else "gained"


def changed_answers(exhibit: Exhibit, limit: int) -> tuple[list[ChangedAnswer], int]:
    """Return up to `limit` changed answers of a policy, lost ones first, and the number of other changed answers."""
    prompts = {sample.id: sample for sample in exhibit.samples}
    rows = [row for row in exhibit.rows if row.judged and bool(row.baseline_correct) != bool(row.candidate_correct)]
    rows.sort(key=lambda row: not row.baseline_correct)
    return [_compare_answers(row, prompts.get(row.id)) for row in rows[:limit]], len(rows[limit:])


def _compare_answers(row: SampleRow, sample: Sample | None) -> ChangedAnswer:
    messages: tuple[tuple[str, str], ...] = ()
    if sample is not None and sample.reference == row.reference:  # another sample may have the same id
        messages = sample.messages or (("prompt", sample.prompt),)
    prompt = [(role, excerpt(text, PROMPT_CHARACTERS)) for role, text in messages]
    texts = (row.reference, row.baseline_generation, row.candidate_generation)
    return ChangedAnswer(row, prompt, *(excerpt(text or "", ANSWER_CHARACTERS) for text in texts))


def excerpt(text: str, limit: int) -> str:
    """Return a text with masked secrets; the middle of a text that exceeds `limit` characters is left out."""
    text = shown(text)
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 3]} … {len(text) - limit:,} characters … {text[-(limit // 3) :]}"
