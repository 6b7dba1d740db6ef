"""Phrases that slow a reader, per 1,000 words of docstrings, comments, messages and Markdown, stay below a limit."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATHS = ("pipeline", "stages", "plugins", "tests", "docs", "README.md", "benchmarks", "examples")
"""Folders and files whose prose is counted."""
LIMIT = 4.0
"""Maximum phrases per 1,000 words."""
PHRASES = re.compile(
    "|".join(
        (
            r"^(?:Of|As|The same|Those|What|Which|Whose|By how|That)\b",  # no noun at the start
            r"\b(?:of|for|in|by|from|to|with|on|at|than|as|is|are|and|but|or|after|before) what\b",
            r"\b(?:those|that|one|ones) (?:of|in|on|at|before|after|without|whose|which|that)\b",
            r"\b(?:of|in|before|after|from|by|with) (?:it|them|these|those|each|both|which|whom)\b(?=[ ,.;:)])",
            r"\bwhere (?:there|it|they|that|no|none|one|some|an?|the|both|such|its|nothing|not|this|all|each|only)\b",
            r"\b(?:there (?:is|are) none|none of them|is none|has none)\b",
            r"\b(?:so|that|as|too) (?:many|much|few|long|far)\b",
            r"\b(?:besides|beside|in place of)\b",
            r"\b(?:says? of|is told|are told|is said|are said|says? nothing|is asked|are asked)\b",
            r"\b(?:need of|has not|have not|be had|let go|goes on|go on|whoever|whatever|nobody|as it is|as they are)\b",
        )
    )
)


TEXTS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Types of tokens with texts. From Python 3.12 on, the parts of an f-string are tokens of their own."""


def python_texts(source: str) -> Iterator[str]:
    """Yield comments, docstrings, and other strings of five or more words."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
        elif token.type in TEXTS and len(re.findall(r"\b[a-z]{2,}\b", token.string)) >= 5:
            yield token.string.strip("rf\"'")


def markdown_texts(source: str) -> Iterator[str]:
    """Yield the lines outside of code blocks, without link targets."""
    for part in source.split("```")[::2]:
        yield from (re.sub(r"`[^`]*`|\]\([^)]*\)", " X ", line).strip("|#-* ") for line in part.splitlines())


READERS = {".py": python_texts, ".md": markdown_texts}


def phrases_per_thousand_words(texts: Iterator[str]) -> float:
    words = hits = 0
    for text in texts:
        for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"``?[^`]*``?", "X", " ".join(text.split()))):
            words += len(sentence.split())
            hits += len(PHRASES.findall(sentence))
    return 1000 * hits / max(words, 1)


@pytest.mark.parametrize("path", PATHS)
def test_prose_stays_below_its_limit_of_slow_phrases(path: str) -> None:
    root = ROOT / path
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    known = [file for file in files if file.suffix in READERS]
    texts = (text for file in known for text in READERS[file.suffix](file.read_text(encoding="utf-8")))
    assert phrases_per_thousand_words(texts) <= LIMIT, "see CONTRIBUTING.md#prose"
