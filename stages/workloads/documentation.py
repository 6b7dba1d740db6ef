"""Python's own documentation, which every CPython carries: real prose that needs no download.

The topics of `help()` overlap, so a paragraph counts once, where it occurs first. Paragraphs in a row make a page, and every
third page belongs to a split, so that splits share no paragraph. The text differs between Python versions; a report's
`workloads_digest` covers the text itself.
"""

import random
import re
import sys
from functools import cache
from pydoc_data.topics import topics

from pipeline.core.errors import UserError
from pipeline.core.records import Sample
from stages.workloads.conversation import Slot, Split

PAGE_CHARACTERS = 1400
"""A page has at least so many characters, about 330 tokens of a model with a vocabulary of 50,000."""
SPLITS: tuple[Split, ...] = ("evaluation", "calibration", "train")
SHORTEST_PARAGRAPH = 100
_TYPESET = str.maketrans({"’": "'", "“": '"', "”": '"', "…": "...", "—": "-", "–": "-"})


def _prose(block: str) -> str | None:
    """Return a block as one line if it is a paragraph of prose, None for headings, grammar, lists and code."""
    lines = block.split("\n")
    indents = {len(line) - len(line.lstrip()) for line in lines}
    text = " ".join(block.split()).translate(_TYPESET)
    prose = len(indents) == 1 and re.match("[A-Z]", text) and text.endswith(".") and len(text) >= SHORTEST_PARAGRAPH
    return text if prose and "::=" not in text and ">>>" not in text else None


@cache
def _pages() -> tuple[tuple[str, ...], ...]:
    blocks = (_prose(block) for name in sorted(topics) for block in topics[name].split("\n\n"))
    pages: list[tuple[str, ...]] = []
    page: list[str] = []
    for paragraph in dict.fromkeys(block for block in blocks if block is not None):
        page.append(paragraph)
        if sum(map(len, page)) >= PAGE_CHARACTERS:
            pages.append(tuple(page))
            page = []
    return tuple(pages)


def pages(split: Split) -> tuple[tuple[str, ...], ...]:
    """Return the paragraphs of every page of a split, in the order of the topics' names."""
    return _pages()[SPLITS.index(split) :: len(SPLITS)]


def excerpt(slot: Slot) -> Sample:
    """Return the first half of a page, which the rest of it continues. Indices of one seed are different pages."""
    order = list(pages(slot.split))
    if slot.index >= len(order):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"documentation: Python {version} has {len(order)} pages of it for {slot.split}, and page {slot.index + 1} was "
            "asked for; ask for fewer (workloads.samples.documentation, calibration.samples)"
        )
    random.Random(f"{slot.split}:documentation:{slot.seed}").shuffle(order)
    text = " ".join(order[slot.index])
    middle = text.index(" ", len(text) // 2)
    return Sample(slot.id, slot.workload, text[middle:], prompt=text[:middle], check="none")
