"""Evictions: pages that leave too early, too late or not at all; and layers that slide otherwise than the model says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.fault import Fault, Plant
from faults.kernels import kernel, nothing
from pipeline.core.kv import PAGE_TOKENS


def keeps(**changes: int) -> Plant:
    """The pool keeps other tokens than the policy says: `changes` are added to the eviction's numbers."""

    def plant(engine: Any) -> None:
        eviction = engine.policy.eviction
        changed = {key: getattr(eviction, key) + by for key, by in changes.items()}
        engine.pool.policy = engine.policy.model_copy(update={"eviction": eviction.model_copy(update=changed)})

    return plant


def _while_evicting(engine: Any, free: Callable[[int], None]) -> None:
    """Free the pages that an append evicts in another way than those of sequences that end."""
    pool, allocator = engine.pool, engine.pool.pages
    places, sound = pool._page_places, allocator.free

    def faulty(*given: Any) -> Any:
        allocator.free = free
        try:
            return places(*given)
        finally:
            allocator.free = sound

    pool._page_places = faulty


def never_freed(engine: Any) -> None:
    """Evicted pages leave the sequence's list and are never free again."""
    _while_evicting(engine, lambda _: None)


def freed_for_all(engine: Any) -> None:
    """An evicted page is free for others at once, though a fork still reads it."""
    allocator = engine.pool.pages
    free = allocator.free

    def present(page: int) -> None:
        if page in allocator._users:
            free(page)

    def forced(page: int) -> None:
        if page in allocator._users:
            allocator._users[page] = 1
            free(page)

    allocator.free = present
    _while_evicting(engine, forced)


def pool_slides(by: int) -> Plant:
    """The pool frees pages as if the model's layers attended to fewer tokens, or to more."""

    def plant(engine: Any) -> None:
        shape = engine.shape
        windows = tuple(None if window is None else window + by for window in shape.windows)
        engine.pool.shape = replace(shape, windows=windows)

    return plant


KIND = "evictions"

FAULTS = [
    Fault("evicted_page_early", KIND, "a page is evicted one page too early", "fp8_streaming",
          keeps(window_tokens=-PAGE_TOKENS)),
    Fault("evicted_under_a_fork", KIND, "an evicted page is reused while a fork still reads it", "fp8_streaming",
          freed_for_all),
    Fault("evicted_never_freed", KIND, "evicted pages are not read and never freed", "fp8_streaming", never_freed),
    Fault("slides_one_short", KIND, "decode: layers attend to one token too few", "fp8_mistral", nothing,
          loads=kernel("length + 1 - layer->slide", "length + 2 - layer->slide")),
    Fault("slid_page_early", KIND, "a page is freed that layers still attend to", "fp8_mistral", pool_slides(-PAGE_TOKENS)),
]  # fmt: skip
