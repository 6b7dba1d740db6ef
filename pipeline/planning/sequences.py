"""What sequences of a length take of the cache, page by page, and how many of a mix a budget admits.

The pages are those of the engines (`stages.engines.paged`): a sequence holds whole pages, those in the policy's window twice,
and a buffer of exact tokens. The whole pages of a prefix that all sequences share are stored once, as `fork` shares them.
A policy may evict, and a model's layers may slide.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape


def page_count(tokens: int) -> int:
    """Return the pages of so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def kept_pages(tokens: int, first: int, latest: int | None) -> set[int]:
    """Return the pages of a sequence that hold its `first` and its `latest` tokens; all where `latest` is None."""
    pages = range(page_count(tokens))
    if latest is None:
        return set(pages)
    return {*pages[: page_count(min(first, tokens))], *pages[max(0, tokens - latest) // PAGE_TOKENS :]}


class SequenceCost:
    """What sequences take under one policy, on one GPU."""

    def __init__(self, policy: KVPolicy, shape: KVShape, windows: Sequence[int | None], *, shared_prefix: int = 0) -> None:
        """Gather the layers that keep the same pages.

        Args:
            policy: The cache's formats.
            shape: The model's, with the KV heads of one GPU.
            windows: By layer, the latest tokens that it attends to; None for all.
            shared_prefix: First tokens that all sequences have in common.
        """
        self.policy = policy
        self.shared_pages = set(range(shared_prefix // PAGE_TOKENS))
        self.exact_bytes = policy.exact_bytes(shape, 1)
        evicting: tuple[int, int | None] = (0, None)
        if policy.eviction is not None:
            # H2O's heavy tokens lie anywhere; they take as many pages as first ones.
            evicting = (policy.eviction.sink_tokens + policy.eviction.heavy_tokens, policy.eviction.window_tokens)
        self.page_bytes: dict[tuple[int, int | None], list[int]] = {}
        """First and latest tokens -> bytes, in all layers that keep their pages, of a page and of its copy in the window."""
        for layer, window in enumerate(windows):
            sizes = self.page_bytes.setdefault(evicting if window is None else (0, window), [0, 0])
            for side, form in policy.sides(layer).items():
                sizes[side.in_window] += PAGE_TOKENS * shape.kv_heads * form.token_bytes(shape.head_dim)

    def own(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens, without the pages that it shares."""
        return self.exact_bytes + self._bytes([tokens], lambda pages: pages - self.shared_pages)

    def shared(self, lengths: Sequence[int]) -> int:
        """Return the bytes of the shared pages that sequences of any of these lengths keep, each stored once."""
        return self._bytes(lengths, self.shared_pages.intersection) if self.shared_pages else 0

    def _bytes(self, lengths: Sequence[int], counted: Callable[[set[int]], set[int]]) -> int:
        """Return the bytes of those pages that are `counted` of all that sequences keep, each page once."""
        total = 0
        for (first, latest), sizes in self.page_bytes.items():
            kept = [counted(kept_pages(tokens, first, latest)) for tokens in lengths]
            windows = [pages & self._window(tokens) for pages, tokens in zip(kept, lengths, strict=True)]
            total += sum(len(set[int]().union(*pages)) * size for pages, size in zip((kept, windows), sizes, strict=True))
        return total

    def _window(self, tokens: int) -> set[int]:
        """The pages in the policy's window."""
        pages = page_count(tokens)
        return set(range(pages - self.policy.window_pages(tokens), pages))


@dataclass(frozen=True)
class Admitted:
    """The requests of a mix that fit a budget."""

    requests: int
    live_tokens: int
    """Of their contexts; a shared prefix counts in each."""
    used_bytes: int


def admit(cost: SequenceCost, cycle: Sequence[int], budget: int) -> Admitted:
    """Admit requests in the order of a mix, over and over, until the next one does not fit.

    Args:
        cost: What each takes.
        cycle: Tokens of each request of the mix, in order.
        budget: Bytes.
    """
    taken = {tokens: cost.own(tokens) for tokens in set(cycle)}
    own, live = ([0, *accumulate(amounts)] for amounts in ([taken[tokens] for tokens in cycle], cycle))
    # The first time round, the shared pages come too.
    seen = {count: tuple(dict.fromkeys(cycle[:count])) for count in range(len(cycle) + 1)}
    shared = {lengths: cost.shared(lengths) for lengths in set(seen.values())}

    def of(amounts: Sequence[int], requests: int) -> int:
        rounds, rest = divmod(requests, len(cycle))
        return rounds * amounts[-1] + amounts[rest]

    def used_bytes(requests: int) -> int:
        return of(own, requests) + shared[seen[min(requests, len(cycle))]]

    most = budget // min(taken.values()) + 1
    requests = max(0, bisect_right(range(most + 1), budget, key=used_bytes) - 1)
    return Admitted(requests, of(live, requests), used_bytes(requests))
