"""Faults of stored data: codes and scales, evictions, and claims about memory, the must-fail control and the baseline."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from faults.hooks import Array, Fault, Plant, Step, both, method, times, write, zero
from stages.policies.policy import PAGE_TOKENS


def drifting(x: Array, step: Step) -> Any:
    """Scale the values by a factor that grows by 0.1 every 100 steps."""
    return x * (1 + step.number // 100 * 0.1)


def rounded_in_its_file(engine: Any) -> None:
    """Change the static value scales of one layer in place. The engine still reports the sound scales."""
    engine._constants["value_scale.3"] *= 1.02


def _some(x: Array, share: int) -> Any:
    """Return a fixed pseudo-random mask of one element in `share`."""
    index = np.arange(x.size, dtype=np.uint64).reshape(x.shape)
    mixed: Array = (index * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % np.uint64(share) == 0
    return mixed


def towards_zero(x: Array, _: Step) -> Any:
    """Decrease the magnitude of half of the integers by one."""
    return x - np.where(_some(x, 2), np.sign(x), 0)


def magnitude_less(x: Array, _: Step) -> Any:
    """Replace half of the floating-point codes by the next smaller magnitude."""
    return np.where(_some(x, 2) & ((x & 0x7F) > 0), x - 1, x)


def evicts_later(tokens: int) -> Plant:
    """Evict tokens that are farther away by this number than the policy says."""

    def apply(engine: Any) -> None:
        eviction = engine.policy.eviction
        changed = eviction.model_copy(update={"window_tokens": eviction.window_tokens + tokens})
        engine.pool.policy = engine.policy.model_copy(update={"eviction": changed})

    return apply


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


freed_for_all = both(method("pool.pages.free", present), while_evicting(forced))
"""Frees an evicted page at once, even if a fork still reads it."""

never_freed = while_evicting(lambda *_: None)
"""Removes evicted pages from the sequence but never frees them."""


def leaves_the_window_at_once(step: Step) -> Any:
    """Select the tokens of a turn of more than 207 tokens that are older than the window at its end."""
    length, count = int(step.lengths[0]), step.ids.shape[1]
    first = step.engine.policy.window.first_page(length + count) * PAGE_TOKENS
    return (step.positions < first) & (step.mode == "prefill" and length > 0 and count > 207)


def twice_the_pool(memory: Any, _: Any) -> Any:
    """Report a pool of twice its size."""
    report = memory()
    return replace(report, pool_bytes=2 * report.pool_bytes)


scale, code, eviction, claim = (partial(Fault, kind) for kind in ("scales", "codes", "evictions", "claims"))

FAULTS = [
    scale("key_scale_head_x1_25", "one head's scale is a stale calibration's",
          write("key_scale", times(1.25), layers=[2], heads=[0])),
    scale("values_x1_02_layer", "one layer's value scale was rounded in its file", rounded_in_its_file),
    scale("groups_swapped", "two groups' scales change places in one head",
          write("value_scale", lambda x, _: x[..., ::-1], layers=[2], heads=[0])),
    scale("scale_drifts", "the scale of new values grows while the engine serves", write("value_scale", drifting)),
    code("truncated", "codes rounded towards zero: a cast instead of a rounding", write("key value", towards_zero)),
    code("fp8_truncated", "FP8 codes are cut off by a shift and a mask, as vLLM's CPU path does",
         write("key value", magnitude_less)),
    code("subnormals_flushed", "FP8 subnormals become zero",
         write("key value", lambda x, _: np.where((x & 0x7F) < 0x08, 0, x))),
    eviction("evicted_page_early", "a page is evicted one page too early", evicts_later(-PAGE_TOKENS)),
    eviction("evicted_under_a_fork", "an evicted page is reused while a fork still reads it", freed_for_all),
    eviction("evicted_never_freed", "evicted pages are not read and never freed", never_freed),
    eviction("turn_beyond_the_window", "tokens of a long turn that leave the window at once get no INT4 values",
             write("value value_scale", zero, leaves_the_window_at_once)),
    claim("pool_twice_as_large", "allocates twice the bytes that the policy says", method("memory", twice_the_pool)),
    claim("control_without_effect", "the must-fail control corrupts a copy that decoding does not read",
          method("corrupt_key_scale", lambda *_: None)),
    claim("shared_page_end_unwritten", "both engines lose the last token of every page",
          write("key value", zero, lambda step: step.positions % PAGE_TOKENS == PAGE_TOKENS - 1)),
]  # fmt: skip
