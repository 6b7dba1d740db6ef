"""The paged pool: which page holds which tokens of which sequence, and the bytes of all of it.

Shapes: L layers, N allocated pages, H KV heads, W code elements of a token, g scales of a token, E exact slots, M exact
buffers. Arrays are head-major, [L, N, H, 64, W], so that a layer's pool is one contiguous block.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.errors import UserError
from pipeline.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.records import MemoryReport
from stages.onnx.formats import SCALE_STORAGE, Side

Array = npt.NDArray[np.generic]
SIDES = ("key", "value")
OUTPUTS = {"pool": "codes", "scale_pool": "code_scales", "exact": "new"}
FLOAT16_MAX = float(np.finfo(np.float16).max)


def output_name(array: str) -> str:
    """Graph output, without its layer, whose rows go into the array of this name."""
    side, kind = array.split("_", 1)
    return f"{side}_{OUTPUTS[kind]}"


@dataclass
class _Sequence:
    exact_slot: int
    length: int = 0
    pages: list[int] = field(default_factory=list)


class _FreeList:
    """Numbers below `capacity`, lowest first: sequences stay at the front of the pool, which is the part that is bound."""

    def __init__(self) -> None:
        self.capacity = 0
        self.used: set[int] = set()
        self._free: list[int] = []

    def grow(self, capacity: int) -> None:
        for number in range(self.capacity, capacity):
            heapq.heappush(self._free, number)
        self.capacity = capacity

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        number = heapq.heappop(self._free)
        self.used.add(number)
        return number

    def give(self, number: int) -> None:
        self.used.remove(number)
        heapq.heappush(self._free, number)


class PagedPool:
    """Storage of the quantized cache of all sequences, and of their exact sink and recent tokens."""

    def __init__(self, policy: KVPolicy, shape: KVShape, max_pages: int) -> None:
        self.policy, self.shape, self.max_pages = policy, shape, max_pages
        self.sides = {name: Side(form, shape.kv_heads, shape.head_dim)
                      for name, form in zip(SIDES, (policy.key, policy.value), strict=True)}  # fmt: skip
        self._pages, self._slots = _FreeList(), _FreeList()
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self.arrays: dict[str, Array] = {}
        """Graph input name without its layer -> array with the layers as first dimension."""
        for name, side in self.sides.items():
            self.arrays[f"{name}_pool"] = self._pool_array(side.storage.numpy_type, side.width)
            if side.groups:
                self.arrays[f"{name}_scale_pool"] = self._pool_array(SCALE_STORAGE.numpy_type, side.groups)
            if policy.exact_tokens:
                dims = (shape.layers, 0, shape.kv_heads, policy.exact_tokens, shape.head_dim)
                self.arrays[f"{name}_exact"] = np.zeros(dims, np.float16)

    def _pool_array(self, dtype: npt.DTypeLike, width: int) -> Array:
        return np.zeros((self.shape.layers, 0, self.shape.kv_heads, PAGE_TOKENS, width), dtype)

    def start(self) -> int:
        """A new, empty sequence's handle."""
        if not self._slots.free:
            self._slots.grow(max(1, 2 * self._slots.capacity))
            for name in SIDES if self.policy.exact_tokens else ():
                self._resize(f"{name}_exact", self._slots.capacity)
        handle, self._next = self._next, self._next + 1
        self._sequences[handle] = _Sequence(self._slots.take())
        return handle

    def release(self, handle: int) -> None:
        sequence = self._sequences.pop(handle)
        self._slots.give(sequence.exact_slot)
        for page in sequence.pages:
            self._pages.give(page)

    def length(self, handle: int) -> int:
        if handle not in self._sequences:
            raise KeyError(f"sequence {handle} was released or never started")
        return self._sequences[handle].length

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Give each sequence the pages for `tokens` more tokens, or raise UserError and give none a page."""
        wanted = {h: -(-(self.length(h) + tokens) // PAGE_TOKENS) - len(self._sequences[h].pages) for h in handles}
        missing = sum(wanted.values()) - self._pages.free
        if missing > 0:
            needed = self._pages.capacity + missing
            if needed > self.max_pages:
                raise UserError(
                    f"max_pages={self.max_pages} is too small: {needed} pages of {PAGE_TOKENS} tokens are needed; "
                    "raise max_pages or run fewer or shorter sequences at once"
                )
            self._pages.grow(min(self.max_pages, max(needed, 2 * self._pages.capacity)))
            for name in self.arrays:
                if name.endswith("_pool"):
                    self._resize(name, self._pages.capacity)
        for handle, count in wanted.items():
            self._sequences[handle].pages.extend(self._pages.take() for _ in range(count))

    def _resize(self, name: str, count: int) -> None:
        old = self.arrays[name]
        new = np.zeros((old.shape[0], count, *old.shape[2:]), old.dtype)
        new[:, : old.shape[1]] = old
        self.arrays[name] = new

    @property
    def bound_pages(self) -> int:
        """Pages up to the last one in use: what a graph must see of the pool."""
        return max(self._pages.used, default=-1) + 1

    def bound(self, name: str) -> int:
        """Second dimension of what a graph must see of an array: pages or exact buffers."""
        return self._slots.capacity if name.endswith("_exact") else self.bound_pages

    def tables(self, handles: Sequence[int]) -> dict[str, npt.NDArray[np.int32]]:
        """page_table (B, P), lengths (B,) and, with exact tokens, exact_slots (B,). Unused entries name page 0."""
        rows = [self._sequences[handle] for handle in handles]
        # Pages that hold no token yet need not be gathered; a prefill without a past still names one page, masked.
        used = [-(-row.length // PAGE_TOKENS) for row in rows]
        table = np.zeros((len(rows), max(1, *used)), np.int32)
        for i, (row, count) in enumerate(zip(rows, used, strict=True)):
            table[i, :count] = row.pages[:count]
        out = {"page_table": table, "lengths": np.array([row.length for row in rows], np.int32)}
        if self.policy.exact_tokens:
            out["exact_slots"] = np.array([row.exact_slot for row in rows], np.int32)
        return out

    def append_tokens(self, handle: int, codes: dict[str, Array]) -> None:
        """Append S tokens of one sequence; arrays (L, 1, H, S, W) by name, pages reserved before."""
        sequence = self._sequences[handle]
        count = next(iter(codes.values())).shape[3]
        positions = np.arange(sequence.length, sequence.length + count)
        pages = np.asarray(sequence.pages)[positions // PAGE_TOKENS]
        for name, new in codes.items():
            if name.endswith("_pool"):
                self.arrays[name][:, pages, :, positions % PAGE_TOKENS] = new[:, 0].transpose(2, 0, 1, 3)
            else:
                self._keep_exact(name, sequence, positions, new[:, 0])
        sequence.length += count

    def append_step(self, handles: Sequence[int], codes: dict[str, Array]) -> None:
        """Append one token to each sequence; arrays (L, B, H, 1, W) by name, pages reserved before."""
        rows = [self._sequences[handle] for handle in handles]
        positions = np.array([row.length for row in rows])
        pages = np.array([row.pages[row.length // PAGE_TOKENS] for row in rows])
        for name, new in codes.items():
            if name.endswith("_pool"):
                self.arrays[name][:, pages, :, positions % PAGE_TOKENS] = new[:, :, :, 0].transpose(1, 0, 2, 3)
            else:
                for i, row in enumerate(rows):
                    self._keep_exact(name, row, positions[i : i + 1], new[:, i])
        for row in rows:
            row.length += 1

    def _keep_exact(self, name: str, row: _Sequence, positions: npt.NDArray[np.int64], new: Array) -> None:
        """Write the sinks and the newest tokens of `new` (L, H, S, D) into the sequence's exact buffer."""
        buffer = self.arrays[name][:, row.exact_slot]
        sink, recent = self.policy.sink_tokens, self.policy.recent_tokens
        sinks = positions < sink
        if sinks.any():
            buffer[:, :, positions[sinks]] = new[:, :, sinks]
        if recent:
            buffer[:, :, sink + positions[-recent:] % recent] = new[:, :, -recent:]

    def scale_array(self, name: str, factor: float) -> None:
        """Multiply a float16 array in place, saturating."""
        product = self.arrays[name].astype(np.float32) * factor
        self.arrays[name][...] = np.clip(product, -FLOAT16_MAX, FLOAT16_MAX)

    def memory(self, static_scale_bytes: int) -> MemoryReport:
        """Bytes of the arrays as allocated."""
        pools = sum(array.nbytes for name, array in self.arrays.items() if name.endswith("_pool"))
        exact = sum(array.nbytes for name, array in self.arrays.items() if name.endswith("_exact"))
        live = sum(row.length for row in self._sequences.values())
        return MemoryReport(pools, exact, static_scale_bytes, self._pages.capacity, live)
