"""Allocation of pages and exact buffers to sequences. A subclass owns the memory."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.core.errors import UserError
from stages.core.records import MemoryReport
from stages.engines.base import SequenceTable
from stages.policies.policy import PAGE_TOKENS, page_count


class PageAllocator:
    """Allocates the numbers 0 to capacity - 1 of pages or exact buffers, lowest free number first.

    This keeps pages close together: a graph reads the whole span between the lowest and the highest page.
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
        """Return the lowest free page, with one user. Raises IndexError if no page is free."""
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def share(self, page: int) -> int:
        """Add a user to a page in use, and return the page."""
        self._users[page] += 1
        return page

    def free(self, page: int) -> None:
        """Remove a user; the page becomes free if no user is left."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            heapq.heappush(self._free, page)


class PoolFull(UserError):
    """The live sequences leave no room in the pool for more tokens."""


@dataclass
class PagedSequence:
    buffer: int
    length: int = 0
    """Number of appended tokens, evicted tokens included."""
    pages: list[int] = field(default_factory=list)
    """Numbers of the pages in order of position; page i starts at token i * PAGE_TOKENS. Evicted pages are left out."""
    evicted_pages: int = 0
    """Number of evicted pages, which followed the sinks' pages."""
    window_pages: list[int] = field(default_factory=list)
    """Pages of the window's pool; the first one holds the second copy of page `first_window_page`."""
    first_window_page: int = 0

    @property
    def kept_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.length - self.evicted_pages * PAGE_TOKENS


class SequencePages(ABC):
    def __init__(self) -> None:
        self.pages, self.buffers, self.window_pages = PageAllocator(), PageAllocator(), PageAllocator()
        self.sequences: SequenceTable[PagedSequence] = SequenceTable()

    @abstractmethod
    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Enlarge the arrays of `allocator` to at least `needed` pages or buffers, keep their contents, and grow the allocator.

        Raises UserError and changes nothing if memory or a limit does not allow it.
        """

    @abstractmethod
    def _numbered_by(self, allocator: PageAllocator) -> Iterator[Any]:
        """Yield the arrays (numpy or torch) of all layers whose first dimension is indexed by the numbers of `allocator`."""

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

    def advance(self, handles: Sequence[int], tokens: int = 1) -> None:
        """Add `tokens` stored tokens to the length of every sequence."""
        for handle in handles:
            self.sequences[handle].length += tokens

    @property
    def live_tokens(self) -> int:
        return sum(sequence.kept_tokens for sequence in self.sequences.values())

    @property
    def in_use(self) -> tuple[int, int]:
        """Numbers of pages and of window pages in use."""
        return self.pages.used_count, self.window_pages.used_count

    def memory(self) -> MemoryReport:
        """Return the allocated bytes of the arrays. Not all bytes are in use, because arrays grow by doubling."""
        allocators = (self.pages, self.buffers, self.window_pages)
        pool, exact, window = (sum(array.nbytes for array in self._numbered_by(allocator)) for allocator in allocators)
        pages, finer = self.pages.capacity, self.window_pages.capacity
        return MemoryReport(pool, exact, window, pages, self.live_tokens, sum(self.in_use), finer)

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Allocate all sequences' pages for `tokens` more tokens. Raises UserError, allocating nothing, if they do not fit."""
        missing = {
            handle: self._pages_for(self.sequences[handle], tokens) - len(self.sequences[handle].pages) for handle in handles
        }
        self._make_room(self.pages, sum(missing.values()))
        for handle, count in missing.items():
            self.sequences[handle].pages.extend(self.pages.allocate() for _ in range(count))

    def pages_needed(self, tokens: int) -> int:
        return self._pages_for(PagedSequence(-1), tokens)

    def _pages_for(self, sequence: PagedSequence, tokens: int) -> int:
        """Return the number of pages that a sequence holds while `tokens` tokens are appended."""
        return page_count(sequence.length + tokens)

    def _make_room(self, allocator: PageAllocator, count: int) -> None:
        """Ensure `count` free pages or buffers. Raises UserError as `_enlarge` does."""
        needed = allocator.used_count + count
        if needed > allocator.capacity:
            self._enlarge(allocator, needed)

    def _allocate(self, allocator: PageAllocator) -> int:
        self._make_room(allocator, 1)
        return allocator.allocate()
