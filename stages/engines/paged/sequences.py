"""Bookkeeping of pages and exact buffers: their numbers, and by sequence. A subclass has the memory that they number."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, page_count
from pipeline.core.records import MemoryReport
from stages.engines.base import SequenceTable


class PageAllocator:
    """Allocates the numbers 0 to capacity - 1: pages, or other things that are numbered, such as exact buffers.

    The lowest free number comes first, so that the pages of a few sequences stay close together: a graph reads their whole
    span.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._users: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._users)

    def grow(self, capacity: int) -> None:
        """Add the pages up to `capacity`; a smaller capacity changes nothing."""
        for page in range(self.capacity, capacity):
            heapq.heappush(self._free, page)
        self.capacity = max(self.capacity, capacity)

    def allocate(self) -> int:
        """Return the lowest free page, which has one user from now on. Raises IndexError when none is free."""
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def share(self, page: int) -> int:
        """Add a user to a page in use, and return the page."""
        self._users[page] += 1
        return page

    def free(self, page: int) -> None:
        """Remove a user; the page is free when that was the last one."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            heapq.heappush(self._free, page)

    def state(self) -> tuple[dict[int, int], list[int]]:
        """Return which pages are in use, for `restore`."""
        return dict(self._users), list(self._free)

    def restore(self, state: tuple[dict[int, int], list[int]]) -> None:
        """Let the pages be in use that were, of the same capacity."""
        self._users, self._free = dict(state[0]), list(state[1])


class PoolFull(UserError):
    """The pool has no room for more tokens while its sequences hold theirs."""


@dataclass
class PagedSequence:
    """The pages and the exact buffer of one sequence."""

    buffer: int
    """Number of its buffer for exact tokens."""
    length: int = 0
    """Tokens that were appended."""
    pages: list[int] = field(default_factory=list)
    """Page i holds its tokens from i * PAGE_TOKENS on; with eviction those are left out that it has lost."""
    evicted_pages: int = 0
    """How many it has lost: those after the pages of the sinks."""
    window_pages: list[int] = field(default_factory=list)
    """Pages of the window's pool; the first holds the second copy of its page `first_window_page`."""
    first_window_page: int = 0

    @property
    def kept_tokens(self) -> int:
        """Tokens in the cache."""
        return self.length - self.evicted_pages * PAGE_TOKENS


class SequencePages(ABC):
    """The pages and exact buffers of all live sequences."""

    def __init__(self) -> None:
        self.pages, self.buffers, self.window_pages = PageAllocator(), PageAllocator(), PageAllocator()
        self.sequences: SequenceTable[PagedSequence] = SequenceTable()

    @abstractmethod
    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Allocate memory for at least `needed` of what `allocator` numbers, keeping what is stored, and grow the allocator.

        Raises UserError, and changes nothing, where memory or a limit does not allow it.
        """

    @abstractmethod
    def _numbered_by(self, allocator: PageAllocator) -> Iterator[Any]:
        """Yield the arrays of all layers whose first dimension `allocator` numbers: numpy's, or torch's."""

    def start(self) -> int:
        """Start an empty sequence and return its handle. Raises UserError when there is no room for its exact buffer."""
        return self.sequences.add(PagedSequence(self._allocate(self.buffers)))

    def release(self, handle: int) -> None:
        """Free the sequence's pages and its exact buffer."""
        sequence = self.sequences.pop(handle)
        self.buffers.free(sequence.buffer)
        for page in sequence.pages:
            self.pages.free(page)
        for page in sequence.window_pages:
            self.window_pages.free(page)

    def length(self, handle: int) -> int:
        """Return the tokens that were appended, evicted ones included. Raises KeyError for a sequence that is not live."""
        return self.sequences[handle].length

    def advance(self, handles: Sequence[int], tokens: int = 1) -> None:
        """Count tokens that were stored of each sequence."""
        for handle in handles:
            self.sequences[handle].length += tokens

    @property
    def live_tokens(self) -> int:
        """Tokens in the caches of all sequences."""
        return sum(sequence.kept_tokens for sequence in self.sequences.values())

    @property
    def in_use(self) -> tuple[int, int]:
        """Pages and window pages that some sequence holds."""
        return self.pages.used_count, self.window_pages.used_count

    def memory(self) -> MemoryReport:
        """Return the bytes of the arrays as allocated: pools and exact buffers may grow by doubling."""
        allocators = (self.pages, self.buffers, self.window_pages)
        pool, exact, window = (sum(array.nbytes for array in self._numbered_by(allocator)) for allocator in allocators)
        pages, finer = self.pages.capacity, self.window_pages.capacity
        return MemoryReport(pool, exact, window, pages, self.live_tokens, sum(self.in_use), finer)

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Give each sequence the pages for `tokens` more tokens. Raises UserError when not all fit, and gives none a page."""
        missing = {
            handle: self._pages_for(self.sequences[handle], tokens) - len(self.sequences[handle].pages) for handle in handles
        }
        self._make_room(self.pages, sum(missing.values()))
        for handle, count in missing.items():
            self.sequences[handle].pages.extend(self.pages.allocate() for _ in range(count))

    def pages_of(self, tokens: int) -> int:
        """Return the pages that a new sequence takes for so many tokens."""
        return self._pages_for(PagedSequence(-1), tokens)

    def _pages_for(self, sequence: PagedSequence, tokens: int) -> int:
        """Return the pages that a sequence holds while `tokens` are appended to it."""
        return page_count(sequence.length + tokens)

    def _make_room(self, allocator: PageAllocator, count: int) -> None:
        """Let at least `count` be free. Raises UserError as `_enlarge`."""
        needed = allocator.used_count + count
        if needed > allocator.capacity:
            self._enlarge(allocator, needed)

    def _allocate(self, allocator: PageAllocator) -> int:
        self._make_room(allocator, 1)
        return allocator.allocate()
