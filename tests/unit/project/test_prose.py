"""Phrases that slow a reader, per 1,000 words of docstrings, comments, messages, pages and Markdown, stay below a limit."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATHS = (
    "pipeline", "stages", "plugins", "tests", "docs", "README.md",
    "benchmarks", "conf", "examples", ".ci", ".github", "requirements", "Dockerfile", "Makefile", "pyproject.toml",
)  # fmt: skip
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


def comment_texts(source: str) -> Iterator[str]:
    """Yield the comments of YAML, TOML, shell, make and Docker files; consecutive lines are one comment."""
    above: list[str] = []
    for line in [*source.splitlines(), ""]:
        comment = re.search(r"(?:^|\s)#+ (.*)$", line)
        if comment is not None:
            above.append(comment[1])
        if above and (comment is None or not line.lstrip().startswith("#")):
            yield " ".join(above)
            above = []


def c_texts(source: str) -> Iterator[str]:
    """Yield comments, and strings of five words or more: messages."""
    for comment, string in re.findall(r'/\*(.*?)\*/|"((?:\w+[ :,.]+){4,}.*?)"', source, re.DOTALL):
        yield re.sub(r"\n \*", " ", comment) or string


def page_texts(source: str) -> Iterator[str]:
    """Yield the lines of a template, with X for inserted values and without tags and statements."""
    for line in re.sub(r"{#|#}", "", source).splitlines():
        yield re.sub(r"<[^<>]*>|{%.*?%}", " ", re.sub(r"{{.*?}}", "X", line))


READERS = {".py": python_texts, ".md": markdown_texts, ".c": c_texts, ".h": c_texts, ".jinja": page_texts}
COMMENTED = {".yaml", ".yml", ".toml", ".in", ""}
"""Suffixes of files with comments after `#`."""


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
    known = [file for file in files if file.suffix in READERS.keys() | COMMENTED]
    texts = (text for file in known for text in READERS.get(file.suffix, comment_texts)(file.read_text(encoding="utf-8")))
    assert phrases_per_thousand_words(texts) <= LIMIT, "see CONTRIBUTING.md#prose"
