"""Text on a page: names, prompts and answers come from outside, and numbers are rounded for readers.

Everything that is shown is without secrets and has no character that a browser would act on or hide. Jinja escapes it.
"""

import math
import unicodedata
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from re import findall
from typing import Literal

from pipeline.core.redaction import redact_text

Segment = tuple[Literal["same", "only"], str]
"""A part of an answer, and whether the other answer has it, too."""

DIFF_WORDS = 2_000
"""Words of an answer up to which differences are looked for: the search is quadratic."""

KEPT = "\n\t"
ACTED_ON = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of controls, of marks that turn or hide text, of halves of characters, and of line separators."""


@lru_cache(maxsize=8192)
def shown(text: str) -> str:
    """Return `text` without secrets, with `\\u{202e}` and the like in place of characters that cannot be seen."""
    return "".join(
        f"\\u{{{ord(c):04x}}}" if unicodedata.category(c) in ACTED_ON and c not in KEPT else c for c in redact_text(text)
    )


@dataclass(frozen=True)
class Excerpt:
    """A text as it is shown, without its middle where it is long."""

    head: str
    tail: str
    left_out: int
    """Characters between the two."""

    @classmethod
    def of(cls, text: str, limit: int) -> "Excerpt":
        """Return the text, or its beginning and its end where it is longer than `limit`."""
        text = shown(text)
        if len(text) <= limit:
            return cls(text, "", 0)
        return cls(text[: limit - limit // 3], text[-(limit // 3) :], len(text) - limit)

    @property
    def whole(self) -> str:
        return f"{self.head} … {self.tail}" if self.left_out else self.head


def differences(before: str, after: str) -> tuple[list[Segment], list[Segment]]:
    """Return both texts in segments, word by word; spaces count as words."""
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


def number(value: float | None, form: str = ".3g") -> str:
    """Return a number for readers; a dash for one that is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form).replace("-", "−")


def quantity(value: float | None) -> str:
    """Return a number of any size with three digits that count."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        return number(value, ".2e").replace("e+0", "e").replace("e−0", "e−").replace("e+", "e")
    if abs(value) >= 1000:
        return number(value, ",.0f")
    return number(value, ".3g")
