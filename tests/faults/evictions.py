"""Evictions: pages that leave too early, too late or not at all; and layers that slide otherwise than the model says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from faults.fault import Fault, Plant
from faults.hooks import Array, on_input
from faults.kernels import Loads, kernel, nothing
from faults.models import SLIDES
from pipeline.core.kv import PAGE_TOKENS
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native.rewrite import use_kernel
from stages.engines.oracle.cache import LayerCache


def keeps(**changes: int | None) -> Plant:
    """The pool keeps other tokens than the policy says: `changes` are added to the eviction's numbers, None makes one zero."""

    def plant(engine: Any) -> None:
        eviction = engine.policy.eviction
        changed = {key: 0 if by is None else getattr(eviction, key) + by for key, by in changes.items()}
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


def fork_forgets(engine: Any) -> None:
    """A fork does not know that its origin has lost pages."""
    fork = engine.pool.fork

    def faulty(handle: int) -> int:
        child: int = fork(handle)
        engine.pool.sequences[child].evicted_pages = 0
        return child

    engine.pool.fork = faulty


def numbered_by_place(engine: Any) -> None:
    """A decoded token is rotated by its place among the tokens that are kept, the earlier ones by their position."""

    def edit(positions: Array, handles: Sequence[int]) -> None:
        for row, handle in enumerate(handles):
            positions[row] = engine.pool.sequences[handle].kept_tokens

    on_input(engine, "decode", "position_ids", edit)


def torch_page_early(engine: Any) -> None:
    """Pages lose theirs a page too early; one pass does not."""
    eviction = engine.policy.eviction
    smaller = eviction.model_copy(update={"window_tokens": eviction.window_tokens - PAGE_TOKENS})
    policy = engine.policy.model_copy(update={"eviction": smaller})
    engine._start = lambda: engine.sequences.add([LayerCache(policy, engine.shape, one) for one in engine.storages])


def pool_slides(by: int) -> Plant:
    """The pool frees pages as if the model's layers attended to fewer tokens, or to more."""

    def plant(engine: Any) -> None:
        shape = engine.shape
        windows = tuple(None if window is None else window + by for window in shape.windows)
        engine.pool.shape = replace(shape, windows=windows)

    return plant


Windows = tuple[int | None, ...]


def kernel_slides(edit: Callable[[Windows], Windows]) -> Loads:
    """Compile decode steps for other windows of the layers than the model has."""

    def faulty(model: Any, info: Any, policy: Any) -> None:
        use_kernel(model, info.model_copy(update={"windows": edit(info.windows)}), policy)

    mutant: Any = faulty
    return lambda: patch.object(onnx_engine, "use_kernel", mutant)


def of_layer(layer: int, window: int | None) -> Callable[[Windows], Windows]:
    return lambda windows: (*windows[:layer], window, *windows[layer + 1 :])


KIND = "evictions"

FAULTS = [
    Fault("evicted_page_early", KIND, "a page is evicted one page too early", "fp8_streaming",
          keeps(window_tokens=-PAGE_TOKENS)),
    Fault("evicted_sinks", KIND, "the sinks are evicted like any other page", "fp8_streaming", keeps(sink_tokens=None)),
    Fault("evicted_under_a_fork", KIND, "an evicted page is reused while a fork still reads it", "fp8_streaming",
          freed_for_all),
    Fault("evicted_forgotten_by_fork", KIND, "a fork does not know that its origin has evicted", "fp8_streaming",
          fork_forgets),
    Fault("evicted_positions_anew", KIND, "decode rotates by the place among kept tokens, prefill by the position",
          "fp8_streaming", numbered_by_place),
    Fault("evicted_never_freed", KIND, "evicted pages are not read and never freed", "fp8_streaming", never_freed),
    Fault("torch_evicted_page_early", KIND, "a page too early in pages; one pass does not", "fp8_streaming", torch_page_early,
          engine="torch"),
    Fault("slides_one_short", KIND, "decode: layers attend to one token too few", "fp8_mistral", nothing,
          loads=kernel("length + 1 - layer->slide", "length + 2 - layer->slide")),
    Fault("slides_one_short_in_a_layer", KIND, "the same in one layer", "fp8_mistral", nothing,
          loads=kernel_slides(of_layer(1, SLIDES - 1))),
    Fault("slid_page_early", KIND, "a page is freed that layers still attend to", "fp8_mistral", pool_slides(-PAGE_TOKENS)),
]  # fmt: skip
