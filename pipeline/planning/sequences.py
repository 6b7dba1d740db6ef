"""What sequences of a length take of the cache, page by page, and how many of a mix a budget admits.

The pages are those of the engines (`stages.engines.paged`): a sequence holds whole pages, those in the policy's window twice,
and a buffer of exact tokens. The whole pages of a prefix that all sequences share are stored once, as `fork` shares them.
A policy may evict. On top of that a capacity may have layers that slide, an eviction of its own, and pages in host memory,
which no engine here has.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.planning.use import Eviction


def page_count(tokens: int) -> int:
    """Return the pages of so many tokens."""
    return -(-tokens // PAGE_TOKENS)


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

    def kept(self, tokens: int) -> set[int]:
        """Return the pages that these layers keep of a sequence."""
        pages = range(page_count(tokens))
        if self.latest is None:
            return set(pages)
        return {*pages[: page_count(min(self.first, tokens))], *pages[max(0, tokens - self.latest) // PAGE_TOKENS :]}


@dataclass(frozen=True)
class Taken:
    """Bytes of sequences on the GPU and in host memory."""

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
        self.shared_pages = set(range(shared_prefix // PAGE_TOKENS))
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
        for group in self.groups:
            kept = group.kept(tokens) - self.shared_pages
            away = int(self.offload * len(kept)) * group.page_bytes
            gpu += len(kept) * group.page_bytes - away + len(kept & self._window(tokens)) * group.window_page_bytes
            host += away
        return Taken(gpu, host)

    def shared(self, lengths: Sequence[int]) -> int:
        """Return the bytes of the shared pages that sequences of any of these lengths keep, each stored once."""
        total = 0
        for group in self.groups if self.shared_pages else ():
            kept = {tokens: group.kept(tokens) & self.shared_pages for tokens in lengths}
            windows = [pages & self._window(tokens) for tokens, pages in kept.items()]
            total += len(set().union(*kept.values())) * group.page_bytes
            total += len(set().union(*windows)) * group.window_page_bytes
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
    gpu, host, live = (
        [0, *accumulate(amounts)] for amounts in ([taken[t].gpu for t in cycle], [taken[t].host for t in cycle], cycle)
    )
    # The first time round, the shared pages come too.
    seen = {count: tuple(dict.fromkeys(cycle[:count])) for count in range(len(cycle) + 1)}
    shared = {lengths: cost.shared(lengths) for lengths in set(seen.values())}

    def of(amounts: Sequence[int], requests: int) -> int:
        rounds, rest = divmod(requests, len(cycle))
        return rounds * amounts[-1] + amounts[rest]

    def gpu_bytes(requests: int) -> int:
        return of(gpu, requests) + shared[seen[min(requests, len(cycle))]]

    most = budget // min(one.gpu for one in taken.values()) + 1
    requests = max(0, bisect_right(range(most + 1), budget, key=gpu_bytes) - 1)
    return Admitted(requests, of(live, requests), gpu_bytes(requests), of(host, requests))
