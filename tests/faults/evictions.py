"""Evictions: pages that leave too early, too late or not at all; and layers that slide otherwise than the model says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
from onnx import numpy_helper

from faults.fault import Fault, Plant
from faults.hooks import Array, Writing, on_input, on_write
from faults.kernels import Loads, kernel, nothing
from faults.models import SLIDES
from pipeline.core.kv import PAGE_TOKENS
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native.rewrite import use_kernel
from stages.engines.onnx.session import GraphSession
from stages.engines.oracle.cache import LayerCache


def keeps(**changes: int | None) -> Plant:
    """The pool keeps other tokens than the policy says: `changes` are added to the eviction's numbers, None makes one zero."""

    def plant(engine: Any) -> None:
        eviction = engine.policy.eviction
        changed = {key: 0 if by is None else getattr(eviction, key) + by for key, by in changes.items()}
        engine.pool.policy = engine.policy.model_copy(update={"eviction": eviction.model_copy(update=changed)})

    return plant


def nothing_leaves(engine: Any) -> None:
    engine.pool.policy = engine.policy.model_copy(update={"eviction": None})


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


def first_of_a_prompt(engine: Any) -> None:
    """Of a prompt that is longer than the cache the first tokens are stored where the latest ones belong."""

    def edit(values: Array, writing: Writing) -> None:
        end = int(writing.positions[0, -1]) + 1
        lost = engine.policy.evicted_pages(end, engine.shape)
        if values.shape[2] == end and lost:
            first, begin = lost.start * PAGE_TOKENS, lost.stop * PAGE_TOKENS
            values[:, :, begin:] = values[:, :, first : first + end - begin].copy()

    for array in ("key_pool", "value_pool"):
        on_write(engine, array, edit)


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


def graphs_slide(by: int, *names: str) -> Loads:
    """Load graphs of these names whose masks are off: every number that says how far a layer's window reaches back."""

    class Mutant(GraphSession):
        def __init__(self, path: Path, threads: int, **options: Any) -> None:
            model = options.pop("model", None) or onnx.load(path, load_external_data=False)
            if path.name in names:
                changed = [_moved(node, by) for body in model.functions for node in body.node if node.op_type == "Constant"]
                assert any(changed), f"{path.name} has no number {SLIDES - 1}"
            super().__init__(path, threads, model=model, **options)

    mutant: Any = Mutant
    return lambda: patch.object(onnx_engine, "GraphSession", mutant)


def _moved(node: onnx.NodeProto, by: int) -> bool:
    """Change a constant that is the reach of a window, which is one less than its tokens."""
    (attribute,) = node.attribute
    if attribute.type != onnx.AttributeProto.TENSOR:
        return False
    value = numpy_helper.to_array(attribute.t)
    if value.size != 1 or value.item() != SLIDES - 1:
        return False
    attribute.t.CopyFrom(numpy_helper.from_array(value + value.dtype.type(by), attribute.t.name))
    return True


KIND = "evictions"

FAULTS = [
    Fault("evicted_page_early", KIND, "a page is evicted one page too early", "fp8_streaming",
          keeps(window_tokens=-PAGE_TOKENS)),
    Fault("evicted_page_late", KIND, "a page is evicted one page too late", "fp8_streaming", keeps(window_tokens=PAGE_TOKENS)),
    Fault("evicted_sinks", KIND, "the sinks are evicted like any other page", "fp8_streaming", keeps(sink_tokens=None)),
    Fault("evicted_nothing", KIND, "nothing is evicted", "fp8_streaming", nothing_leaves),
    Fault("evicted_under_a_fork", KIND, "an evicted page is reused while a fork still reads it", "fp8_streaming",
          freed_for_all),
    Fault("evicted_prompt_end", KIND, "prefill counts the window from the wrong end: the first tokens of a prompt stay",
          "fp8_streaming", first_of_a_prompt),
    Fault("evicted_forgotten_by_fork", KIND, "a fork does not know that its origin has evicted", "fp8_streaming",
          fork_forgets),
    Fault("evicted_positions_anew", KIND, "decode rotates by the place among kept tokens, prefill by the position",
          "fp8_streaming", numbered_by_place),
    Fault("evicted_never_freed", KIND, "evicted pages are not read and never freed", "fp8_streaming", never_freed),
    Fault("evicted_page_early_graph", KIND, "a page too early, without sinks, read by the graph's own attention",
          "int8_sliding", keeps(window_tokens=-PAGE_TOKENS), engine="graph"),
    Fault("torch_evicted_page_early", KIND, "a page too early in pages; one pass does not", "fp8_streaming", torch_page_early,
          engine="torch"),
    Fault("slides_one_short", KIND, "decode: layers attend to one token too few", "fp8_mistral", nothing,
          loads=kernel("length + 1 - layer->slide", "length + 2 - layer->slide")),
    Fault("slides_one_long", KIND, "decode: layers attend to one token too many", "fp8_mistral", nothing,
          loads=kernel("length + 1 - layer->slide", "length - layer->slide")),
    Fault("slides_one_short_in_a_layer", KIND, "the same, too few, in one layer", "fp8_mistral", nothing,
          loads=kernel_slides(of_layer(1, SLIDES - 1))),
    Fault("slides_one_long_in_prefill", KIND, "prefill: layers attend to one token too many", "fp8_mistral", nothing,
          loads=graphs_slide(1, "prefill.onnx")),
    Fault("slid_page_early", KIND, "a page is freed that layers still attend to", "fp8_mistral", pool_slides(-PAGE_TOKENS)),
    Fault("slides_not", KIND, "decode: a layer that slides attends to all", "fp8_qwen2", nothing,
          loads=kernel_slides(of_layer(2, None))),
    Fault("slides_swapped", KIND, "decode: two layers have each other's window", "fp8_qwen2", nothing,
          loads=kernel_slides(lambda windows: (windows[0], windows[2], windows[1], windows[3]))),
]  # fmt: skip
