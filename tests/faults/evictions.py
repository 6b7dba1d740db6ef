"""Faults of evictions: pages freed too early, too late or never, and a wrong window of finer copies."""

from collections.abc import Callable
from functools import partial
from typing import Any

from faults.fault import Fault
from faults.hooks import Plant, Step, method, write, zero
from stages.policies.policy import PAGE_TOKENS


def evicts_later(tokens: int) -> Plant:
    """Evict tokens that are farther away by this number than the policy says."""

    def apply(engine: Any) -> None:
        eviction = engine.policy.eviction
        changed = eviction.model_copy(update={"window_tokens": eviction.window_tokens + tokens})
        engine.pool.policy = engine.policy.model_copy(update={"eviction": changed})

    return Plant(apply)


def while_evicting(free: Callable[[Any, int], None]) -> Plant:
    """Replace the function that frees evicted pages; pages of finished sequences are freed as before."""

    def faulty(places: Any, engine: Any, *given: Any) -> Any:
        allocator = engine.pool.pages
        sound = allocator.free
        allocator.free = partial(free, allocator)
        try:
            return places(*given)
        finally:
            allocator.free = sound

    return method("pool._page_places", faulty)


def forced(allocator: Any, page: int) -> None:
    if page in allocator._users:
        allocator._users[page] = 1
        type(allocator).free(allocator, page)


def present(free: Any, engine: Any, page: int) -> None:
    if page in engine.pool.pages._users:
        free(page)


freed_for_all = method("pool.pages.free", present) + while_evicting(forced)
"""Frees an evicted page at once, even if a fork still reads it."""

never_freed = while_evicting(lambda *_: None)
"""Removes evicted pages from the sequence but never frees them."""


def leaves_the_window_at_once(step: Step) -> Any:
    """Select the tokens of a turn of more than 207 tokens that are older than the window at its end."""
    length, count = int(step.lengths[0]), step.ids.shape[1]
    first = step.engine.policy.window.first_page(length + count) * PAGE_TOKENS
    return (step.positions < first) & (step.mode == "prefill" and length > 0 and count > 207)


of = partial(Fault, "evictions")

FAULTS = [
    of("evicted_page_early", "a page is evicted one page too early", evicts_later(-PAGE_TOKENS)),
    of("evicted_page_late", "a page is evicted one page too late", evicts_later(PAGE_TOKENS)),
    of("evicted_under_a_fork", "an evicted page is reused while a fork still reads it", freed_for_all),
    of("evicted_never_freed", "evicted pages are not read and never freed", never_freed),
    of("turn_beyond_the_window", "tokens of a long turn that leave the window at once get no INT4 values",
       write("value value_scale", zero, leaves_the_window_at_once)),
]  # fmt: skip
