"""What sequences of a length take of the cache, page by page, and how many of a mix a budget admits.

The pages are those of the engines (`stages.engines.paged`): a sequence holds whole pages, those in the policy's window twice,
and a buffer of exact tokens. The whole pages of a prefix that all sequences share are stored once, as `fork` shares them.
A policy may evict. On top of that a capacity may have layers that slide, an eviction of its own, and pages in host memory,
which no engine here has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.planning.use import Eviction

Ranges = tuple[tuple[int, int], ...]
"""Pages of a sequence: from each first one up to, without, each last one; in order, none empty."""


def page_count(tokens: int) -> int:
    """Return the pages of so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def kept_pages(tokens: int, first: int, latest: int | None) -> Ranges:
    """Return the pages of a sequence that hold any of its first or latest tokens; all where `latest` is None."""
    pages = page_count(tokens)
    begin = 0 if latest is None else max(0, tokens - latest) // PAGE_TOKENS
    sinks = page_count(min(first, tokens))
    if begin <= sinks:
        return ((0, pages),)
    return ((0, sinks), (begin, pages)) if sinks else ((begin, pages),)


def within(ranges: Ranges, low: int, high: int) -> Ranges:
    """Return what of some pages lies from `low` up to `high`."""
    cut = ((max(begin, low), min(end, high)) for begin, end in ranges)
    return tuple((begin, end) for begin, end in cut if begin < end)


def count(ranges: Ranges) -> int:
    """Return the number of pages."""
    return sum(end - begin for begin, end in ranges)


def union(parts: Sequence[Ranges]) -> int:
    """Return the number of pages that are in any of the parts."""
    total, reached = 0, 0
    for begin, end in sorted(span for part in parts for span in part):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same pages."""

    first: int
    latest: int | None
    """The first and the latest tokens whose pages they keep; all where `latest` is None."""
    page_bytes: int
    """Of one page in all of these layers."""
    window_page_bytes: int
    """Of the second copy of a page in the policy's window."""


@dataclass(frozen=True)
class Taken:
    """Bytes of one sequence, without what it shares."""

    gpu: int
    host: int


class SequenceCost:
    """What sequences take under one policy, on one GPU."""

    def __init__(
        self,
        policy: KVPolicy,
        shape: KVShape,
        windows: Sequence[int | None],
        *,
        shared_prefix: int = 0,
        eviction: Eviction | None = None,
        offload_share: float = 0.0,
    ) -> None:
        """Gather the layers that keep the same pages.

        Args:
            policy: The cache's formats.
            shape: The model's, with the KV heads of one GPU.
            windows: By layer, the latest tokens that it attends to; None for all.
            shared_prefix: First tokens that all sequences have in common.
            eviction: What the layers with full attention keep of a policy without an eviction; None for everything.
            offload_share: Share of a sequence's own pages that lies in host memory, rounded down to whole pages.
        """
        self.policy = policy
        self.shared_pages = shared_prefix // PAGE_TOKENS
        self.offload = Fraction(str(offload_share))
        self.exact_bytes = policy.exact_bytes(shape, 1)
        if policy.eviction is not None:
            # H2O's heavy tokens lie anywhere; they take as many pages as first ones.
            first = policy.eviction.sink_tokens + policy.eviction.heavy_tokens
            eviction = Eviction(first=first, latest=policy.eviction.window_tokens)
        by_kept: dict[tuple[int, int | None], list[int]] = {}
        for layer, window in enumerate(windows):
            kept = (0, window) if window is not None else (0, None) if eviction is None else (eviction.first, eviction.latest)
            sizes = by_kept.setdefault(kept, [0, 0])
            for side, form in policy.sides(layer).items():
                sizes[side.in_window] += PAGE_TOKENS * shape.kv_heads * form.token_bytes(shape.head_dim)
        self.groups = [LayerGroup(*kept, *sizes) for kept, sizes in by_kept.items()]

    def own(self, tokens: int) -> Taken:
        """Return the bytes of a sequence of `tokens` tokens, without the pages that it shares."""
        gpu, host = self.exact_bytes, 0
        pages = page_count(tokens)
        for group in self.groups:
            kept = within(kept_pages(tokens, group.first, group.latest), self.shared_pages, pages)
            away = int(self.offload * count(kept)) * group.page_bytes
            gpu += count(kept) * group.page_bytes - away
            gpu += count(within(kept, *self._window(tokens))) * group.window_page_bytes
            host += away
        return Taken(gpu, host)

    def shared(self, lengths: frozenset[int]) -> int:
        """Return the bytes of the shared pages that sequences of any of these lengths keep, each stored once."""
        total = 0
        for group in self.groups if self.shared_pages else ():
            kept = {t: within(kept_pages(t, group.first, group.latest), 0, self.shared_pages) for t in lengths}
            total += union(list(kept.values())) * group.page_bytes
            total += union([within(part, *self._window(t)) for t, part in kept.items()]) * group.window_page_bytes
        return total

    def alone(self, tokens: int) -> int:
        """Return the bytes on the GPU of a sequence that shares nothing with others."""
        return self.own(tokens).gpu + self.shared(frozenset({tokens}))

    def _window(self, tokens: int) -> tuple[int, int]:
        """The pages in the policy's window."""
        pages = page_count(tokens)
        return (pages - self.policy.window_pages(tokens), pages)

    @property
    def borders(self) -> set[int]:
        """Token counts modulo a page after which bytes may change: where pages end, and where windows leave one behind."""
        latest = (group.latest for group in self.groups if group.latest is not None)
        return {0, PAGE_TOKENS - 1, *((tokens - 1) % PAGE_TOKENS for tokens in latest)}

    @property
    def settled_pages(self) -> int:
        """Pages from which on a longer sequence takes the same bytes more for each page: beyond every window."""
        windows = [group.first + group.latest for group in self.groups if group.latest is not None]
        windows += [self.policy.window.tokens] if self.policy.window is not None else []
        return page_count(max(windows, default=0)) + 2

    @property
    def growth(self) -> int:
        """Bytes that a page more adds beyond `settled_pages`."""
        return sum(group.page_bytes for group in self.groups if group.latest is None)


@dataclass(frozen=True)
class Admitted:
    """The requests of a mix that fit a budget."""

    requests: int
    live_tokens: int
    """Of their contexts; a shared prefix counts in each."""
    gpu_bytes: int
    host_bytes: int


def admit(cost: SequenceCost, cycle: Sequence[int], budget: int) -> Admitted:
    """Admit requests in the order of a mix, over and over, until the next one does not fit.

    Args:
        cost: What each takes.
        cycle: Tokens of each request of the mix, in order.
        budget: Bytes on the GPU.
    """
    taken = {tokens: cost.own(tokens) for tokens in set(cycle)}
    used, host, live, requests = 0, 0, 0, 0
    present: frozenset[int] = frozenset()
    shared = 0
    for tokens in cycle:  # the first time round, the shared pages come too
        with_it = cost.shared(present | {tokens})
        if used + taken[tokens].gpu + with_it > budget:
            return Admitted(requests, live, used + shared, host)
        present, shared = present | {tokens}, with_it
        used, host, live, requests = used + taken[tokens].gpu, host + taken[tokens].host, live + tokens, requests + 1
    rounds = (budget - shared - used) // used
    used, host, live, requests = (value * (rounds + 1) for value in (used, host, live, requests))
    for tokens in cycle:
        if used + taken[tokens].gpu + shared > budget:
            break
        used, host, live, requests = used + taken[tokens].gpu, host + taken[tokens].host, live + tokens, requests + 1
    return Admitted(requests, live, used + shared, host)


def holds_from(gain: Callable[[int], int], borders: set[int], settled_pages: int, growth: int) -> int | None:
    """Return the least number of tokens from which on, for every longer sequence too, `gain` is positive; None for never.

    Args:
        gain: Of a number of tokens; constant between `borders`, and beyond `settled_pages` it grows evenly by page.
        borders: Token counts modulo a page after which `gain` may change.
        settled_pages: Pages from which on it grows evenly.
        growth: By how much a page beyond adds to it.
    """
    if growth < 0:
        return None
    ends = [border or PAGE_TOKENS for border in borders]
    last = 0
    for tokens in (page * PAGE_TOKENS + end for page in range(settled_pages) for end in ends):
        if gain(tokens) <= 0:
            last = max(last, tokens)
    for tokens in (settled_pages * PAGE_TOKENS + end for end in ends):
        short = -gain(tokens)
        if short >= 0:
            if growth == 0:
                return None
            last = max(last, tokens + short // growth * PAGE_TOKENS)
    return last + 1
