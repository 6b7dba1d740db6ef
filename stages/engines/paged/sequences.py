"""Numbers of pages and exact buffers, and the sequences that own them."""

import heapq
from dataclasses import dataclass, field

from stages.core.errors import UserError
from stages.policies.policy import PAGE_TOKENS


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
