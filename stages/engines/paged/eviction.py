"""Which pages a sequence loses as it grows, and where its new tokens go among those that it keeps.

Shapes: B sequences, S new tokens of each.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from stages.engines.paged.sequences import PagedSequence

Indices = npt.NDArray[np.int64]


def refuse_heavy_tokens(policy: KVPolicy) -> None:
    """Raise UserError for H2O's eviction."""
    if policy.eviction is not None and policy.eviction.heavy_tokens:
        raise UserError(
            f"kv.eviction.heavy_tokens={policy.eviction.heavy_tokens}: each layer and KV head keeps tokens of its own, which a "
            "page table that all of them share cannot say; use backend=torch backend.device=cpu, or set heavy_tokens to 0"
        )


def pages_for(policy: KVPolicy, shape: KVShape, sequence: PagedSequence, tokens: int) -> int:
    """Return the pages that a sequence holds while `tokens` are appended to it.

    Those that it loses are among them, because the new tokens read them; those of new tokens that are lost at once are not.
    """
    held, end = (-(-length // PAGE_TOKENS) for length in (sequence.length, sequence.length + tokens))
    lost = policy.evicted_pages(sequence.length + tokens, shape)
    return end - sequence.evicted_pages - max(0, lost.stop - max(held, lost.start))


def evict(policy: KVPolicy, shape: KVShape, sequence: PagedSequence, tokens: int) -> list[int]:
    """Take the pages from a sequence that it loses when `tokens` are appended, and return them."""
    lost = policy.evicted_pages(sequence.length + tokens, shape)
    held = -(-sequence.length // PAGE_TOKENS) - sequence.evicted_pages
    leaving = sequence.pages[lost.start : min(held, lost.stop - sequence.evicted_pages)]
    del sequence.pages[lost.start : lost.start + len(leaving)]
    sequence.evicted_pages = len(lost)
    return leaving


def entries(sequences: Sequence[PagedSequence], pages: Indices, sink_pages: int) -> tuple[Indices, Indices]:
    """Find pages (B, S), numbered by position, in the lists of sequences that have evicted.

    Returns:
        The indices of those that are kept, counted over the flat (B, S), and the place (B, S) of each in its sequence's list;
        that of a page that is not kept is any before.
    """
    evicted = np.array([sequence.evicted_pages for sequence in sequences])[:, None]
    kept = np.flatnonzero((pages < sink_pages) | (pages >= sink_pages + evicted))
    return kept, np.where(pages < sink_pages, pages, np.maximum(pages - evicted, 0))
