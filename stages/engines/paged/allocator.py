"""Numbers of pages, handed out lowest first and shared by counting their users."""

import heapq


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
