"""The paged pool: which page holds which tokens of which sequence, and the bytes of all of it.

Shapes: N allocated pages, H KV heads, W elements of a token, E exact slots, M exact buffers, B sequences, S new tokens of
each. Every array belongs to one layer and is named like the graph's input: `key_pool.3` (N, H, 64, W), `key_exact.3`
(M, H, E, D). Pages in the window are numbered apart, in arrays of their own: `window_value_pool.3`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UserError
from pipeline.core.formats import MAX_FLOAT16
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.core.records import MemoryReport
from stages.engines.onnx.formats import FLOAT16, layer_sides
from stages.engines.paged.allocator import Numbers

Array = npt.NDArray[np.generic]
Indices = npt.NDArray[np.int64]


@dataclass
class _Sequence:
    exact_slot: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    young: list[int] = field(default_factory=list)
    """Window pages, the first of them for page `first_young` of the sequence."""
    first_young: int = 0


@dataclass(frozen=True)
class Spans:
    """First and one past the last exact buffer, page and window page that a graph is shown."""

    moves: int
    """How often arrays had been allocated anew."""
    slots: tuple[int, int]
    pages: tuple[int, int]
    young: tuple[int, int]


class PagedPool:
    """Storage of the quantized cache of all sequences, of its second copies in the window, and of exact tokens."""

    def __init__(self, policy: KVPolicy, shape: KVShape, max_pages: int) -> None:
        self.policy, self.shape, self.max_pages = policy, shape, max_pages
        self._pages, self._young, self._slots = Numbers(), Numbers(), Numbers()
        self._sequences: dict[int, _Sequence] = {}
        self._handles = count()
        self.arrays: dict[str, Array] = {}
        self._numbers: dict[str, Numbers] = {}
        """What numbers the first dimension of each array."""
        self._moves = 0
        """How often arrays were allocated anew."""
        for layer in range(shape.layers):
            for side in layer_sides(policy, shape, layer).values():
                numbers = self._young if side.name.startswith("window") else self._pages
                for name, (storage, width) in side.arrays.items():
                    self._add(f"{name}.{layer}", numbers, (PAGE_TOKENS, width), storage.numpy_type)
            if policy.exact_tokens:
                for name in ("key_exact", "value_exact"):
                    self._add(f"{name}.{layer}", self._slots, (policy.exact_tokens, shape.head_dim), FLOAT16.numpy_type)

    def _add(self, name: str, numbers: Numbers, dims: tuple[int, int], dtype: npt.DTypeLike) -> None:
        self.arrays[name], self._numbers[name] = self._zeros((0, self.shape.kv_heads, *dims), np.dtype(dtype)), numbers

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of the pool; torch's on another device."""
        return np.zeros(shape, dtype)

    def start(self) -> int:
        """A new, empty sequence's handle."""
        if not self._slots.free:
            self._grow(self._slots, max(1, 2 * self._slots.capacity))
        handle = next(self._handles)
        self._sequences[handle] = _Sequence(self._slots.take())
        return handle

    def fork(self, handle: int) -> int:
        """A new sequence with the same tokens. Full pages are shared; what either will write to is copied."""
        full = self.length(handle) // PAGE_TOKENS
        source = self._sequences[handle]
        partial = source.length % PAGE_TOKENS != 0
        self._make_room(int(partial))
        child = self.start()
        row = self._sequences[child]
        row.length, row.first_young = source.length, source.first_young
        row.pages = [self._pages.share(page) for page in source.pages[:full]]
        if partial:
            row.pages.append(self._copy(self._pages, source.pages[full]))
        for number, page in enumerate(source.young, start=source.first_young):
            row.young.append(self._young.share(page) if number < full else self._copy(self._young, page))
        for array in self._of(self._slots):
            array[row.exact_slot] = array[source.exact_slot]
        return child

    def _copy(self, numbers: Numbers, page: int) -> int:
        if not numbers.free:
            self._grow(numbers, 2 * numbers.capacity)
        copy = numbers.take()
        for array in self._of(numbers):
            array[copy] = array[page]
        return copy

    def release(self, handle: int) -> None:
        sequence = self._sequences.pop(handle)
        self._slots.give(sequence.exact_slot)
        for page in sequence.pages:
            self._pages.give(page)
        for page in sequence.young:
            self._young.give(page)

    def length(self, handle: int) -> int:
        if handle not in self._sequences:
            raise KeyError(f"sequence {handle} was released or never started")
        return self._sequences[handle].length

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Give each sequence the pages for `tokens` more tokens, or raise UserError and give none a page."""
        wanted = {h: -(-(self.length(h) + tokens) // PAGE_TOKENS) - len(self._sequences[h].pages) for h in handles}
        self._make_room(sum(wanted.values()))
        for handle, pages in wanted.items():
            self._sequences[handle].pages.extend(self._pages.take() for _ in range(pages))

    def _make_room(self, pages: int) -> None:
        needed = self._pages.capacity + pages - self._pages.free
        if needed > self.max_pages:
            raise UserError(
                f"max_pages={self.max_pages} is too small: {needed} pages of {PAGE_TOKENS} tokens are needed; "
                "raise max_pages or run fewer or shorter sequences at once"
            )
        if needed > self._pages.capacity:
            self._grow(self._pages, min(self.max_pages, max(needed, 2 * self._pages.capacity)))

    def _grow(self, numbers: Numbers, capacity: int) -> None:
        """Enlarge what is numbered, keeping what is stored."""
        numbers.grow(capacity)
        for name, old in self.arrays.items():
            if self._numbers[name] is numbers:
                new = self._zeros((capacity, *old.shape[1:]), old.dtype)
                new[: len(old)] = old
                self.arrays[name] = new
        self._moves += 1

    def _of(self, numbers: Numbers) -> Iterator[Array]:
        return (array for name, array in self.arrays.items() if self._numbers[name] is numbers)

    @property
    def in_use(self) -> tuple[int, int]:
        """Pages and window pages that some sequence holds."""
        return self._pages.used, self._young.used

    def view(self, handles: Sequence[int]) -> tuple[dict[str, npt.NDArray[np.int32]], Spans]:
        """Tables whose pages count from the first one that any of these sequences uses, and the pages that they span: what
        a graph is shown, since it may have to widen all of that before it gathers."""
        tables = self.tables(handles)
        spans = [(0, self._slots.capacity)]
        for names in (("page_table", "young_table"), ("window_table",)):
            held = [tables[name] for name in names if name in tables]
            low = min((int(table.min()) for table in held), default=0)
            spans.append((low, 1 + max((int(table.max()) for table in held), default=low)))
            tables |= {name: tables[name] - low for name in names if name in tables}
        return tables, Spans(self._moves, *spans)

    def shown(self, name: str, spans: Spans) -> Array:
        """The part of an array that a graph sees."""
        numbers = self._numbers[name]
        span = spans.slots if numbers is self._slots else spans.young if numbers is self._young else spans.pages
        return self.arrays[name][slice(*span)]

    def tables(self, handles: Sequence[int]) -> dict[str, npt.NDArray[np.int32]]:
        """The attention's tables (AttentionSpec.tables). Unused entries name the lowest page, which lengths or starts mask."""
        rows = [self._sequences[handle] for handle in handles]
        lengths = [row.length for row in rows]
        # Pages that hold no token yet need not be gathered.
        used = [-(-length // PAGE_TOKENS) for length in lengths]
        out = {"lengths": np.array(lengths, np.int32)}
        low = min((page for row, end in zip(rows, used, strict=True) for page in row.pages[:end]), default=0)
        window = self.policy.window
        if window is None:
            out["page_table"] = _table([row.pages[:end] for row, end in zip(rows, used, strict=True)], low)
        else:
            if not self._young.capacity:
                self._grow(self._young, 1)
            firsts = [window.first_page(length) for length in lengths]
            out["page_table"] = _table([row.pages[:first] for row, first in zip(rows, firsts, strict=True)], low)
            out["young_table"] = _table([row.pages[i:j] for row, i, j in zip(rows, firsts, used, strict=True)], low)
            out["window_table"] = _table(
                [row.young for row in rows], min((page for row in rows for page in row.young), default=0)
            )
            out["window_starts"] = np.array(firsts, np.int32) * PAGE_TOKENS
        if self.policy.exact_tokens:
            out["exact_slots"] = np.array([row.exact_slot for row in rows], np.int32)
        return out

    def append(self, handles: Sequence[int], new: Mapping[str, Array]) -> None:
        """Append S tokens to each (distinct) sequence; arrays (B, H, S, W) by name, pages reserved before."""
        rows = [self._sequences[handle] for handle in handles]
        tokens = next(iter(new.values())).shape[2]
        starts = np.array([row.length for row in rows])[:, None]
        positions = starts + np.arange(tokens)
        pages = positions // PAGE_TOKENS
        within = (positions % PAGE_TOKENS).ravel()
        every = np.arange(len(within))
        places = {self._pages: [(every, _lookup([(row.pages, 0) for row in rows], pages), within)]}
        if self.policy.window is not None:
            for row in rows:
                self._move_window(row, row.length + tokens)
            young = np.flatnonzero(pages >= np.array([row.first_young for row in rows])[:, None])
            held = [(row.young, row.first_young) for row in rows]
            places[self._young] = [(young, _lookup(held, pages)[young], within[young])]
        if self.policy.exact_tokens:
            places[self._slots] = self._exact_places(rows, positions, starts + tokens)
        found = {numbers: [self._index(place) for place in listed] for numbers, listed in places.items()}
        for name, values in new.items():
            self._write(self.arrays[name], values, found[self._numbers[name]])
        for row in rows:
            row.length += tokens

    def _index(self, place: tuple[Indices, Indices, Indices]) -> tuple[Any, Any, Any]:
        """What indexes the arrays: torch's on another device."""
        return place

    def _write(self, array: Any, values: Any, places: list[tuple[Any, Any, Any]]) -> None:
        """Write the chosen ones of the new tokens `values` (B, H, S, W), row after row, to (number, slot) of an array."""
        flat = values.swapaxes(1, 2).reshape(-1, *array.shape[1::2])
        for chosen, number, slot in places:
            array[number, :, slot] = flat[chosen]

    def _move_window(self, row: _Sequence, length: int) -> None:
        """Forget the pages that leave the window of a sequence that grows to `length`, take those that enter."""
        assert self.policy.window is not None
        first = self.policy.window.first_page(length)
        while row.first_young < first:
            if row.young:
                self._young.give(row.young.pop(0))
            row.first_young += 1
        for _ in range(self.policy.window_pages(length) - len(row.young)):
            if not self._young.free:
                self._grow(self._young, max(1, 2 * self._young.capacity))
            row.young.append(self._young.take())

    def _exact_places(self, rows: list[_Sequence], positions: Indices, ends: Indices) -> list[tuple[Indices, Indices, Indices]]:
        """Tokens that are kept exactly, the buffer and the slot of each: the sinks, then the newest ones."""
        sink, recent = self.policy.sink_tokens, self.policy.recent_tokens
        buffers = np.broadcast_to(np.array([row.exact_slot for row in rows])[:, None], positions.shape).ravel()
        flat = positions.ravel()
        chosen = [np.flatnonzero(positions < sink)] if sink else []
        slots = [flat[tokens] for tokens in chosen]
        if recent:
            chosen.append(np.flatnonzero(positions >= ends - recent))
            slots.append(sink + flat[chosen[-1]] % recent)
        return [(tokens, buffers[tokens], slot) for tokens, slot in zip(chosen, slots, strict=True)]

    def scale_array(self, name: str, factor: float) -> None:
        """Multiply an array of scales, or of keys that have none, in place."""
        self.arrays[name][...] = scaled(self.arrays[name], factor)

    def memory(self, static_scale_bytes: int) -> MemoryReport:
        """Bytes of the arrays as allocated."""
        pool, exact, window = (sum(a.nbytes for a in self._of(n)) for n in (self._pages, self._slots, self._young))
        live = sum(row.length for row in self._sequences.values())
        return MemoryReport(pool, exact, window, static_scale_bytes, self._pages.capacity, live)


def scaled(values: Array, factor: float) -> Array:
    """Floating-point values times a factor, saturating at float16's range."""
    return np.clip(values.astype(np.float32) * factor, -MAX_FLOAT16, MAX_FLOAT16).astype(values.dtype)


def _table(rows: list[list[int]], fill: int) -> npt.NDArray[np.int32]:
    """Rows of unequal lengths, filled up; at least one column, because a graph must have something to gather."""
    table = np.full((len(rows), max(1, *map(len, rows))), fill, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _lookup(held: Sequence[tuple[list[int], int]], pages: Indices) -> Indices:
    """Numbers of the pages (B, S) of sequences that hold some from a first one on; flat, any number for earlier pages."""
    found = []
    for (numbers, first), wanted in zip(held, pages, strict=True):
        start = max(first, int(wanted[0]))
        found.append(np.array(numbers[start - first :])[np.maximum(wanted - start, 0)])
    return np.concatenate(found)
