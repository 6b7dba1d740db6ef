"""Faults of evictions: pages freed too early, too late or never, wrong windows of finer copies, wrong sliding layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from faults.fault import Fault
from faults.hooks import Plant, Step, method, write, zero
from faults.kernels import mutant
from stages.policies.policy import PAGE_TOKENS


def keeps(part: str, **changes: int) -> Plant:
    """Change the pool's eviction or window: add `changes` to the policy's numbers."""

    def apply(engine: Any) -> None:
        sound = getattr(engine.policy, part)
        changed = sound.model_copy(update={key: getattr(sound, key) + by for key, by in changes.items()})
        engine.pool.policy = engine.policy.model_copy(update={part: changed})

    return Plant("pool.policy", apply)


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
slides = partial(mutant, kind="evictions")

FAULTS = [
    of("evicted_page_early", "fp8_streaming", "a page is evicted one page too early",
       keeps("eviction", window_tokens=-PAGE_TOKENS), by="conformance"),
    of("evicted_page_late", "fp8_streaming", "a page is evicted one page too late",
       keeps("eviction", window_tokens=PAGE_TOKENS), by="conformance"),
    of("evicted_under_a_fork", "fp8_streaming", "an evicted page is reused while a fork still reads it", freed_for_all),
    of("evicted_never_freed", "fp8_streaming", "evicted pages are not read and never freed", never_freed),
    slides("slides_one_short", "fp8_mistral", "layers attend to one token too few",
           "length + 1 - layer->slide", "length + 2 - layer->slide", by="conformance"),
    of("turn_beyond_the_window", "fp8_windowed", "tokens of a long turn that leave the window at once get no INT4 values",
       write("value value_scale", zero, leaves_the_window_at_once)),
]  # fmt: skip
