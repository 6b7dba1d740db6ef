"""Text on a page: untrusted names, prompts and answers, and rounded numbers.

Secrets are masked, and characters that a browser would interpret or hide are replaced. Jinja escapes HTML.
"""

import math
import unicodedata
from difflib import SequenceMatcher
from functools import lru_cache
from re import findall
from typing import Literal

from stages.core.redaction import redact_text

Segment = tuple[Literal["same", "only"], str]
"""A part of an answer, marked "same" if the other answer contains it, too, and otherwise "only"."""

DIFF_WORDS = 2_000
"""Maximum words of an answer for a comparison word by word, which takes quadratic time."""

KEPT = "\n\t"
ACTED_ON = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control characters, marks that reorder or hide text, surrogates, and line separators."""


@lru_cache(maxsize=8192)
def shown(text: str) -> str:
    """Return `text` with masked secrets; invisible characters are replaced by escapes such as `\\u{202e}`."""
    return "".join(
        f"\\u{{{ord(c):04x}}}" if unicodedata.category(c) in ACTED_ON and c not in KEPT else c for c in redact_text(text)
    )


def excerpt(text: str, limit: int) -> str:
    """Return a text with masked secrets; the middle of a text that exceeds `limit` characters is left out."""
    text = shown(text)
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 3]} … {len(text) - limit:,} characters … {text[-(limit // 3) :]}"


def differences(before: str, after: str) -> tuple[list[Segment], list[Segment]]:
    """Compare two texts word by word and return both as segments; spaces count as words."""
    words: list[list[str]] = [findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after)]
    if any(len(some) > DIFF_WORDS for some in words):
        return [("only", before)], [("only", after)]
    left: list[Segment] = []
    right: list[Segment] = []
    for tag, a, b, c, d in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, part in ((left, words[0][a:b]), (right, words[1][c:d])):
            if part:
                side.append(("same" if tag == "equal" else "only", "".join(part)))
    return left, right


def quantity(value: float | None) -> str:
    """Format a number with three significant digits; a missing or non-finite number becomes a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    form = ".2e" if value and not 1e-3 <= abs(value) < 1e4 else ",.0f" if abs(value) >= 1000 else ".3g"
    return format(value or 0.0, form).replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
