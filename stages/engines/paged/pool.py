"""The paged pool: the arrays of the cache, the pages of every sequence, and where new tokens are written.

Shapes: N allocated pages, H KV heads, W elements of a token, E exact slots, M exact buffers, B sequences, S new tokens per
sequence. Every array belongs to one layer and is named like the graph's input: `key_pool.3` (N, H, 64, W), `key_exact.3`
(M, H, E, D). Pages in the window have their own numbering and their own arrays: `window_value_pool.3`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.core.records import MemoryReport
from stages.engines.base import SequenceTable
from stages.engines.paged.layout import StoredSide
from stages.engines.paged.sequences import PageAllocator, PagedSequence, PoolFull
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, page_count
from stages.policies.spec import FLOAT16, MAX_FLOAT16

Array = npt.NDArray[np.generic]
Indices = npt.NDArray[np.int64]
Places = tuple[Indices, Indices, Indices]
"""Indices of new tokens (row after row), and for each index the page or buffer and the slot where the token is written."""


@dataclass(frozen=True)
class Spans:
    """Half-open ranges of the exact buffers, pages and window pages that a graph reads."""

    moves: int
    """`moves` of the pool."""
    buffers: tuple[int, int]
    pages: tuple[int, int]
    window_pages: tuple[int, int]


def exact_places(policy: KVPolicy, rows: Sequence[PagedSequence], positions: Indices, ends: Indices) -> list[Places]:
    """Return the places of new tokens in the exact buffers: sinks first, then the newest tokens."""
    sink, recent = policy.sink_tokens, policy.recent_tokens
    buffers = np.broadcast_to(np.array([row.buffer for row in rows])[:, None], positions.shape).ravel()
    flat = positions.ravel()
    chosen = [np.flatnonzero(positions < sink)] if sink else []
    slots = [flat[tokens] for tokens in chosen]
    if recent:
        chosen.append(np.flatnonzero(positions >= ends - recent))
        slots.append(sink + flat[chosen[-1]] % recent)
    return [(tokens, buffers[tokens], slot) for tokens, slot in zip(chosen, slots, strict=True)]


def pad_rows(rows: list[list[int]], fill: int) -> npt.NDArray[np.int32]:
    """Pad rows with `fill` to equal lengths, and to at least one column, because a graph cannot gather zero pages."""
    filled = np.full((len(rows), max(1, *map(len, rows))), fill, np.int32)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    return filled


def page_numbers(rows: Sequence[tuple[list[int], int]], pages: Indices) -> Indices:
    """Return the page numbers of the page indices `pages` (B, S), flattened; arbitrary below the first page index of a row.

    `rows`: (page numbers, page index of the first number) per sequence.
    """
    numbers = []
    for (page_table, first), page in zip(rows, pages, strict=True):
        start = max(first, int(page[0]))
        numbers.append(np.array(page_table[start - first :])[np.maximum(page - start, 0)])
    return np.concatenate(numbers)


class PagedPool:
    """Storage of the quantized cache of all sequences, including the window's second copies and the exact tokens."""

    def __init__(self, policy: KVPolicy, shape: KVShape, max_pages: int) -> None:
        self.policy, self.shape, self.max_pages = policy, shape, max_pages
        self.pages, self.buffers, self.window_pages = PageAllocator(), PageAllocator(), PageAllocator()
        self.sequences: SequenceTable[PagedSequence] = SequenceTable()
        self.arrays: dict[str, Array] = {}
        self._allocators: dict[str, PageAllocator] = {}
        """Allocator of the first dimension, by array."""
        self.moves = 0
        """Number of reallocations of the arrays. Each reallocation changes their addresses."""
        for layer in range(shape.layers):
            for side, stored in StoredSide.of_layer(policy, shape, layer).items():
                allocator = self.window_pages if side.in_window else self.pages
                for name, (storage, width) in stored.arrays.items():
                    self._add(f"{name}.{layer}", allocator, (PAGE_TOKENS, width), storage.numpy)
            if policy.exact_tokens:
                for name in ("key_exact", "value_exact"):
                    self._add(f"{name}.{layer}", self.buffers, (policy.exact_tokens, shape.head_dim), FLOAT16.numpy)

    def _add(self, name: str, allocator: PageAllocator, dims: tuple[int, int], dtype: npt.DTypeLike) -> None:
        self.arrays[name] = self._zeros((0, self.shape.kv_heads, *dims), np.dtype(dtype))
        self._allocators[name] = allocator

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return zeros for an array of the pool. A subclass on another device returns a torch tensor."""
        return np.zeros(shape, dtype)

    def constant(self, values: npt.NDArray[np.float32]) -> Any:
        """Return an array of the pool's device that attention reads and `corrupt_key_scale` multiplies in place."""
        return values

    def on_host(self, constant: Any) -> npt.NDArray[np.float32]:
        """Return a numpy copy of a result of `constant`."""
        return np.array(constant)

    def start(self) -> int:
        """Start an empty sequence and return its handle. Raises UserError if there is no room for its exact buffer."""
        return self.sequences.add(PagedSequence(self._allocate(self.buffers)))

    def release(self, handle: int) -> None:
        sequence = self.sequences.pop(handle)
        self.buffers.free(sequence.buffer)
        for page in sequence.pages:
            self.pages.free(page)
        for page in sequence.window_pages:
            self.window_pages.free(page)

    def length(self, handle: int) -> int:
        """Return the number of appended tokens, evicted tokens included. Raises KeyError if the sequence is not live."""
        return self.sequences[handle].length

    def advance(self, handles: Sequence[int], tokens: int) -> None:
        """Add `tokens` stored tokens to the length of every sequence."""
        for handle in handles:
            self.sequences[handle].length += tokens

    @property
    def in_use(self) -> tuple[int, int]:
        """Numbers of pages and of window pages in use."""
        return self.pages.used_count, self.window_pages.used_count

    def memory(self) -> MemoryReport:
        """Return the allocated bytes of the arrays. Not all bytes are in use, because arrays grow by doubling."""
        allocators = (self.pages, self.buffers, self.window_pages)
        pool, exact, window = (sum(array.nbytes for array in self._numbered_by(allocator)) for allocator in allocators)
        pages, finer = self.pages.capacity, self.window_pages.capacity
        live_tokens = sum(sequence.kept_tokens for sequence in self.sequences.values())
        return MemoryReport(pool, exact, window, pages, live_tokens, sum(self.in_use), finer)

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Allocate all sequences' pages for `tokens` more tokens. Raises UserError, allocating nothing, if they do not fit."""
        missing = {
            handle: self._pages_for(self.sequences[handle], tokens) - len(self.sequences[handle].pages) for handle in handles
        }
        self._make_room(self.pages, sum(missing.values()))
        for handle, count in missing.items():
            self.sequences[handle].pages.extend(self.pages.allocate() for _ in range(count))

    def pages_needed(self, tokens: int) -> int:
        """Return the number of pages of a new sequence with `tokens` tokens."""
        return self._pages_for(PagedSequence(-1), tokens)

    def fork(self, handle: int) -> int:
        """Start a sequence with the same tokens, which shares full pages. Raises UserError if there is no room for copies."""
        source = self.sequences[handle]
        full = source.length // PAGE_TOKENS
        shared = full - source.evicted_pages
        partial = source.length % PAGE_TOKENS != 0
        self._make_room(self.pages, int(partial))
        self._make_room(self.window_pages, int(partial and bool(source.window_pages)))
        child = self.start()
        fork = self.sequences[child]
        fork.length, fork.first_window_page = source.length, source.first_window_page
        fork.evicted_pages = source.evicted_pages
        fork.pages = [self.pages.share(page) for page in source.pages[:shared]]
        if partial:
            fork.pages.append(self._copy(self.pages, source.pages[shared]))
        for number, page in enumerate(source.window_pages, start=source.first_window_page):
            copy = self.window_pages.share(page) if number < full else self._copy(self.window_pages, page)
            fork.window_pages.append(copy)
        for array in self._numbered_by(self.buffers):
            array[fork.buffer] = array[source.buffer]
        return child

    def _copy(self, allocator: PageAllocator, page: int) -> int:
        copy = self._allocate(allocator)
        for array in self._numbered_by(allocator):
            array[copy] = array[page]
        return copy

    def _allocate(self, allocator: PageAllocator) -> int:
        self._make_room(allocator, 1)
        return allocator.allocate()

    def _make_room(self, allocator: PageAllocator, count: int) -> None:
        """Ensure `count` free pages or buffers. Raises UserError, and changes nothing, if memory or a limit is too small."""
        needed = allocator.used_count + count
        if allocator is self.pages and needed > self.max_pages:
            raise PoolFull(
                f"max_pages={self.max_pages} is too small: {needed} pages of {PAGE_TOKENS} tokens are needed; "
                "raise max_pages or run fewer or shorter sequences at once"
            )
        if needed > allocator.capacity:
            self._enlarge(allocator, needed)

    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Double the capacity, or grow it to `needed` if that is more; pages grow to at most `max_pages`."""
        capacity = max(needed, 2 * allocator.capacity)
        self._resize(allocator, min(self.max_pages, capacity) if allocator is self.pages else capacity)

    def _resize(self, allocator: PageAllocator, capacity: int) -> None:
        allocator.grow(capacity)
        for name, old in self.arrays.items():
            if self._allocators[name] is allocator:
                new = self._zeros((capacity, *old.shape[1:]), old.dtype)
                new[: len(old)] = old
                self.arrays[name] = new
        self.moves += 1

    def _numbered_by(self, allocator: PageAllocator) -> Iterator[Array]:
        """Yield the arrays of all layers whose first dimension is indexed by the numbers of `allocator`."""
        return (array for name, array in self.arrays.items() if self._allocators[name] is allocator)

    def view(self, handles: Sequence[int]) -> tuple[dict[str, npt.NDArray[np.int32]], Spans]:
        """Return the tables of sequences, and the spans of the arrays that the tables refer to.

        Page numbers are relative to the start of their span. A graph gets only the spans, because it may widen its whole input.
        """
        tables = self.tables(handles)
        spans = [(0, self.buffers.capacity)]
        for names in (("page_table", "window_base_table"), ("window_table",)):
            present = [tables[name] for name in names if name in tables]
            low = min((int(table.min()) for table in present), default=0)
            spans.append((low, 1 + max((int(table.max()) for table in present), default=low)))
            tables |= {name: tables[name] - low for name in names if name in tables}
        return tables, Spans(self.moves, *spans)

    def array_view(self, name: str, spans: Spans) -> Array:
        allocator = self._allocators[name]
        if allocator is self.buffers:
            return self.arrays[name][slice(*spans.buffers)]
        return self.arrays[name][slice(*(spans.pages if allocator is self.pages else spans.window_pages))]

    def tables(self, handles: Sequence[int]) -> dict[str, npt.NDArray[np.int32]]:
        """Return the tables that attention reads; AttentionSpec.tables defines their names.

        Unused entries repeat the lowest page number; lengths or starts mask these entries. Lengths and starts count kept tokens
        only: attention needs no positions, since the keys are already rotated.
        """
        rows = [self.sequences[handle] for handle in handles]
        lengths = [row.kept_tokens for row in rows]
        # Reserved pages without tokens are not gathered.
        ends = [page_count(length) for length in lengths]
        tables = {"lengths": np.array(lengths, np.int32)}
        low = min((page for row, end in zip(rows, ends, strict=True) for page in row.pages[:end]), default=0)
        window = self.policy.window
        if window is None:
            tables["page_table"] = pad_rows([row.pages[:end] for row, end in zip(rows, ends, strict=True)], low)
        else:
            if not self.window_pages.capacity:
                self._enlarge(self.window_pages, 1)
            firsts = [window.first_page(row.length) - row.evicted_pages for row in rows]
            tables["page_table"] = pad_rows([row.pages[:first] for row, first in zip(rows, firsts, strict=True)], low)
            in_window = [row.pages[first:end] for row, first, end in zip(rows, firsts, ends, strict=True)]
            tables["window_base_table"] = pad_rows(in_window, low)
            lowest = min((page for row in rows for page in row.window_pages), default=0)
            tables["window_table"] = pad_rows([row.window_pages for row in rows], lowest)
            tables["window_starts"] = np.array(firsts, np.int32) * PAGE_TOKENS
        if self.policy.exact_tokens:
            tables["exact_slots"] = np.array([row.buffer for row in rows], np.int32)
        return tables

    def append(self, handles: Sequence[int], new: Mapping[str, Array]) -> None:
        """Append S tokens to every sequence. The sequences are distinct, and their pages must be reserved."""
        tokens = next(iter(new.values())).shape[2]
        places = self.places(handles, tokens)
        for name, values in new.items():
            self._write(self.arrays[name], values, places[self._allocators[name]])
        self.advance(handles, tokens)

    def places(self, handles: Sequence[int], tokens: int) -> dict[PageAllocator, list[Places]]:
        """Move windows, free evicted pages, and return allocator -> places of each sequence's next `tokens` tokens."""
        rows = [self.sequences[handle] for handle in handles]
        starts = np.array([row.length for row in rows])[:, None]
        positions = starts + np.arange(tokens)
        pages = positions // PAGE_TOKENS
        slots = (positions % PAGE_TOKENS).ravel()
        places = {self.pages: [self._page_places(rows, pages, slots, tokens)]}
        if self.policy.window is not None:
            for row in rows:
                self._move_window(row, row.length + tokens)
            inside = np.flatnonzero(pages >= np.array([row.first_window_page for row in rows])[:, None])
            numbers = page_numbers([(row.window_pages, row.first_window_page) for row in rows], pages)
            places[self.window_pages] = [(inside, numbers[inside], slots[inside])]
        if self.policy.exact_tokens:
            places[self.buffers] = exact_places(self.policy, rows, positions, starts + tokens)
        return places

    def _write(self, array: Array, values: Array, places: list[Places]) -> None:
        """Write the new tokens `values` (B, H, S, W) to their places in an array."""
        flat = values.swapaxes(1, 2).reshape(-1, *array.shape[1::2])
        for chosen, number, slot in places:
            array[number, :, slot] = flat[chosen]

    def _pages_for(self, sequence: PagedSequence, tokens: int) -> int:
        """Return the number of pages that a sequence holds while `tokens` tokens are appended."""
        # Count the pages that this append evicts, because the new tokens still read them. Do not count pages that would hold
        # only new tokens and are evicted at once.
        begin, end = map(page_count, (sequence.length, sequence.length + tokens))
        lost = self.policy.evicted_pages(sequence.length + tokens, self.shape)
        return end - sequence.evicted_pages - max(0, lost.stop - max(begin, lost.start))

    def _page_places(self, rows: list[PagedSequence], pages: Indices, slots: Indices, tokens: int) -> Places:
        """Free the evicted pages, and return the places of the new tokens that stay."""
        tables = [(row.pages, 0) for row in rows]
        if self.policy.latest_tokens(self.shape) is None:
            return np.arange(slots.size), page_numbers(tables, pages), slots
        for row in rows:
            self._evict(row, tokens)
        # A sequence lists its sinks' pages, then the pages after the evicted gap.
        sinks, evicted = self.policy.sink_pages, np.array([row.evicted_pages for row in rows])[:, None]
        stored = np.flatnonzero((pages < sinks) | (pages >= sinks + evicted))
        indices = np.where(pages < sinks, pages, np.maximum(pages - evicted, 0))
        return stored, page_numbers(tables, indices)[stored], slots[stored]

    def _evict(self, row: PagedSequence, tokens: int) -> None:
        lost = self.policy.evicted_pages(row.length + tokens, self.shape)
        pages = page_count(row.length) - row.evicted_pages
        leaving = slice(lost.start, min(pages, lost.stop - row.evicted_pages))
        for page in row.pages[leaving]:
            self.pages.free(page)
        del row.pages[leaving]
        row.evicted_pages = len(lost)

    def _move_window(self, row: PagedSequence, length: int) -> None:
        """Move a sequence's window before it grows to `length`: free the pages that leave it, and allocate the new ones."""
        assert self.policy.window is not None
        first = self.policy.window.first_page(length)
        while row.first_window_page < first:
            if row.window_pages:
                self.window_pages.free(row.window_pages.pop(0))
            row.first_window_page += 1
        for _ in range(self.policy.window_pages(length) - len(row.window_pages)):
            row.window_pages.append(self._allocate(self.window_pages))

    def stored(self, handle: int) -> dict[str, tuple[int, npt.NDArray[np.uint8]]]:
        """Return (position of the first token, bytes (H, n, W) of n tokens) by array; evicted tokens are filled with zeros."""
        row = self.sequences[handle]
        lost = self.policy.evicted_pages(row.length, self.shape)
        places = {self.pages: (0, row.pages), self.window_pages: (row.first_window_page * PAGE_TOKENS, row.window_pages)}
        stored = {}
        for name, array in self.arrays.items():
            if self._allocators[name] is not self.buffers:
                first, numbers = places[self._allocators[name]]
                by_head = self._bytes(array, numbers).swapaxes(0, 1)
                codes = by_head.reshape(len(by_head), -1, by_head.shape[-1])
                if lost and self._allocators[name] is self.pages:
                    gap = np.zeros((len(codes), len(lost) * PAGE_TOKENS, codes.shape[-1]), codes.dtype)
                    sinks = lost.start * PAGE_TOKENS
                    codes = np.concatenate([codes[:, :sinks], gap, codes[:, sinks:]], axis=1)
                stored[name] = first, codes[:, : max(0, row.length - first)]
        return stored

    def _bytes(self, array: Any, numbers: list[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes (P, H, 64, W) of P pages of an array. A subclass on another device copies them to the host."""
        return np.ascontiguousarray(array[numbers]).view(np.uint8)

    def scale_array(self, name: str, factor: float) -> None:
        self.arrays[name][...] = saturated_product(self.arrays[name], factor)


def saturated_product(values: Array, factor: float) -> Array:
    """Return floating-point values times a factor, saturating at float16's range."""
    return np.clip(values.astype(np.float32) * factor, -MAX_FLOAT16, MAX_FLOAT16).astype(values.dtype)
