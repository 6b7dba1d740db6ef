"""Where new tokens go in a paged cache, tables of pages, and which pages a graph reads.

Shapes: B sequences, S new tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.kv import PAGE_TOKENS, KVPolicy
from stages.engines.paged.sequences import PagedSequence

Indices = npt.NDArray[np.int64]
Places = tuple[Indices, Indices, Indices]
"""Indices into the new tokens (row after row), and the page or buffer and the slot in it that each of them goes to."""


@dataclass(frozen=True)
class Spans:
    """First and one past the last exact buffer, page and window page that a graph reads."""

    moves: int
    """Counts the times that arrays were allocated anew, which changed their addresses."""
    buffers: tuple[int, int]
    pages: tuple[int, int]
    window_pages: tuple[int, int]


def exact_places(policy: KVPolicy, rows: Sequence[PagedSequence], positions: Indices, ends: Indices) -> list[Places]:
    """Places in the exact buffers: those of the sinks, then those of the newest tokens."""
    sink, recent = policy.sink_tokens, policy.recent_tokens
    buffers = np.broadcast_to(np.array([row.buffer for row in rows])[:, None], positions.shape).ravel()
    flat = positions.ravel()
    chosen = [np.flatnonzero(positions < sink)] if sink else []
    slots = [flat[tokens] for tokens in chosen]
    if recent:
        chosen.append(np.flatnonzero(positions >= ends - recent))
        slots.append(sink + flat[chosen[-1]] % recent)
    return [(tokens, buffers[tokens], slot) for tokens, slot in zip(chosen, slots, strict=True)]


def append_rows(row: PagedSequence, tokens: int, recent_tokens: int) -> tuple[Indices, Indices, Indices]:
    """Positions of a sequence's next tokens, the page of each, and its row slot, as the kernels' append takes them.

    Several tokens of a chunk may share a slot of the ring, in which the last one must stay. So only the newest `recent_tokens`
    have the sequence's buffer as their slot, and those before it -1 - buffer, by which only sinks are kept exactly.
    """
    end = row.length + tokens
    positions = np.arange(row.length, end)
    first = row.length // PAGE_TOKENS
    pages = np.array(row.pages[first : -(-end // PAGE_TOKENS)])[positions // PAGE_TOKENS - first]
    return positions, pages, np.where(positions >= end - recent_tokens, row.buffer, -1 - row.buffer)


def table(rows: list[list[int]], fill: int) -> npt.NDArray[np.int32]:
    """Rows of unequal lengths, filled up; at least one column, because a graph must have something to gather."""
    filled = np.full((len(rows), max(1, *map(len, rows))), fill, np.int32)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    return filled


def lookup(rows: Sequence[tuple[list[int], int]], pages: Indices) -> Indices:
    """Numbers of the pages (B, S) of sequences, flat.

    A row lists the numbers of a sequence's pages from some first page on; for pages before that one any number is returned.
    """
    numbers = []
    for (listed, first), positions in zip(rows, pages, strict=True):
        start = max(first, int(positions[0]))
        numbers.append(np.array(listed[start - first :])[np.maximum(positions - start, 0)])
    return np.concatenate(numbers)
