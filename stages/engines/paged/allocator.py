"""Numbers of pages or buffers, handed out lowest first and shared by counting their users."""

import heapq


class Numbers:
    """Numbers below `capacity`. Lowest first, so that what a few sequences use stays together: a graph is shown the span."""

    def __init__(self) -> None:
        self.capacity = 0
        self._users: dict[int, int] = {}
        self._free: list[int] = []

    def grow(self, capacity: int) -> None:
        for number in range(self.capacity, capacity):
            heapq.heappush(self._free, number)
        self.capacity = max(self.capacity, capacity)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._users)

    def take(self) -> int:
        number = heapq.heappop(self._free)
        self._users[number] = 1
        return number

    def share(self, number: int) -> int:
        """One more user of a number in use."""
        self._users[number] += 1
        return number

    def give(self, number: int) -> None:
        """One user less; free when it was the last."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            heapq.heappush(self._free, number)
