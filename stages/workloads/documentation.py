"""Python's own documentation, which is part of every CPython: real prose without a download.

The topics of `help()` overlap, so only the first occurrence of a paragraph is used. Consecutive paragraphs form a page. Each
split gets every third page, so that splits share no paragraph. The text differs between Python versions; a report's
`workloads_digest` covers the text itself.
"""

import random
import re
import sys
from functools import cache
from pydoc_data.topics import topics

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.workloads.conversation import Slot, Split

PAGE_CHARACTERS = 1400
"""Minimum characters per page: about 330 tokens of a model with a vocabulary of 50,000."""
SPLITS: tuple[Split, ...] = ("evaluation", "calibration", "train")
MIN_PARAGRAPH = 100
_TO_ASCII = str.maketrans({"’": "'", "“": '"', "”": '"', "…": "...", "—": "-", "–": "-"})


def _prose(block: str) -> str | None:
    """Return a block as one line if it is a paragraph of prose; None for headings, grammar, lists and code."""
    lines = block.split("\n")
    indents = {len(line) - len(line.lstrip()) for line in lines}
    text = " ".join(block.split()).translate(_TO_ASCII)
    prose = len(indents) == 1 and re.match("[A-Z]", text) and text.endswith(".") and len(text) >= MIN_PARAGRAPH
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
    """Return the pages of a split, each a tuple of paragraphs, in the order of the topics' names."""
    return _pages()[SPLITS.index(split) :: len(SPLITS)]


def excerpt(slot: Slot) -> Sample:
    """Return a sample: the first half of a page as prompt, the second half as reference. Every index has another page."""
    order = list(pages(slot.split))
    if slot.index >= len(order):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"documentation: Python {version} has {len(order)} pages for {slot.split}, no page {slot.index + 1}; ask for fewer "
            "(workloads.samples.documentation, calibration.samples)"
        )
    random.Random(f"{slot.split}:documentation:{slot.seed}").shuffle(order)
    text = " ".join(order[slot.index])
    middle = text.index(" ", len(text) // 2)
    return Sample(slot.id, slot.workload, text[middle:], prompt=text[:middle], check="none")
