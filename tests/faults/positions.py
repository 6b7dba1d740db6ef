"""Positions, sinks and windows: the right token at the wrong place, or kept otherwise than the policy says."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Writing, on_input, on_write
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.records import PREFILL_CHUNK


def rotated_one_late(engine: Any) -> None:
    """Decoded tokens get the next position's rotation: prompt and answer disagree by one."""

    def edit(positions: Array, _: Sequence[int]) -> None:
        positions += 1

    on_input(engine, "decode", "position_ids", edit)


def after_fork(engine: Any) -> None:
    """A forked sequence counts from the start of the page that it copied."""
    forked: set[int] = set()
    fork = engine.pool.fork

    def noting(handle: int) -> int:
        child: int = fork(handle)
        forked.add(child)
        return child

    def edit(positions: Array, handles: Sequence[int]) -> None:
        for row, handle in enumerate(handles):
            if handle in forked:
                positions[row] -= 1

    engine.pool.fork = noting
    on_input(engine, "decode", "position_ids", edit)


def after_extend(engine: Any) -> None:
    """What follows a shared prefix is rotated as if the prefix ended with its last full page."""

    def edit(positions: Array, _: Sequence[int]) -> None:
        start = positions[:, :1] % PREFILL_CHUNK
        positions -= start % PAGE_TOKENS

    on_input(engine, "prefill", "position_ids", edit)


def capped(engine: Any) -> None:
    """A rotation table of 1,024 rows: later positions have its last one."""

    def edit(positions: Array, _: Sequence[int]) -> None:
        np.minimum(positions, 1023, out=positions)

    on_input(engine, "prefill", "position_ids", edit)
    on_input(engine, "decode", "position_ids", edit)


def chunk_border_lost(engine: Any) -> None:
    def edit(values: Array, writing: Writing) -> None:
        lost = (writing.positions % PREFILL_CHUNK == PREFILL_CHUNK - 1)[:, None, :, None]
        values[...] = np.where(lost, 0, values)

    for array in ("key_pool", "value_pool"):
        on_write(engine, array, edit)


def beyond_decoded(limit: int) -> Any:
    """Tokens of a sequence are not written once it has decoded so many."""

    def plant(engine: Any) -> None:
        decoded: dict[tuple[int, str], int] = {}

        def edit(array: str) -> Any:
            def lose(values: Array, writing: Writing) -> None:
                for row, handle in enumerate(writing.handles if values.shape[2] == 1 else ()):
                    key = (handle, f"{array}.{writing.layer}")
                    decoded[key] = decoded.get(key, 0) + 1
                    if decoded[key] > limit:
                        values[row] = 0

            return lose

        for array in ("key_pool", "value_pool"):
            on_write(engine, array, edit(array))

    return plant


def exact_is_quantized(engine: Any) -> None:
    """What the policy calls exact went through the codes before."""

    def edit(side: str) -> Any:
        def replace(values: Array, writing: Writing) -> None:
            codes, scales = (writing.new[f"{side}_{name}.{writing.layer}"] for name in ("pool", "scale_pool"))
            values[...] = codes * scales.astype(np.float32)

        return replace

    for side in ("key", "value"):
        on_write(engine, f"{side}_exact", edit(side))


def recent_one_slot_off(engine: Any) -> None:
    """The ring of recent tokens is written one slot further than it is read."""
    pool, places = engine.pool, engine.pool._exact_places
    sink, recent = engine.policy.sink_tokens, engine.policy.recent_tokens

    def faulty(*given: Any) -> Any:
        return [
            (tokens, buffers, np.where(slots >= sink, sink + (slots - sink + 1) % recent, slots))
            for tokens, buffers, slots in places(*given)
        ]

    pool._exact_places = faulty


def window_one_page_short(engine: Any) -> None:
    """The window holds a page less than the policy says."""
    policy = engine.pool.policy
    assert policy.window is not None
    smaller = policy.window.model_copy(update={"tokens": policy.window.tokens - PAGE_TOKENS})
    engine.pool.policy = policy.model_copy(update={"window": smaller})


def window_unscaled(engine: Any) -> None:
    """The window's copy is read with the scale of the layer before."""
    names = sorted(name for name in engine._constants if name.startswith("window_value_scale."))
    values = [engine._constants[name].copy() for name in names]
    for name, other in zip(names, values[-1:] + values[:-1], strict=True):
        engine._constants[name][...] = other


KIND = "positions"

FAULTS = [
    Fault("rope_one_late", KIND, "decoded tokens are rotated one position late", "fp8", rotated_one_late),
    Fault("rope_after_fork", KIND, "a forked sequence's tokens are rotated one position early", "fp8", after_fork),
    Fault("rope_after_prefix", KIND, "what follows a shared prefix is rotated from its last full page on", "fp8", after_extend),
    Fault("rope_beyond_1024", KIND, "a rotation table of 1,024 rows", "fp8", capped),
    Fault("chunk_border_lost", KIND, "the last token of a prefill chunk is not stored", "int8", chunk_border_lost),
    Fault("after_192_decoded", KIND, "nothing is stored once a sequence has decoded 192 tokens", "int8", beyond_decoded(192)),
    Fault("sinks_quantized", KIND, "sinks and recent tokens are exact by name only", "int8_sinks", exact_is_quantized),
    Fault("recent_one_slot_off", KIND, "the ring of recent tokens is written one slot off", "int8_sinks", recent_one_slot_off),
    Fault("window_one_page_short", KIND, "the window ends a page too early", "fp8_windowed", window_one_page_short),
    Fault("window_scale_of_the_layer_before", KIND, "the window's copies are read with another layer's scale", "fp8_windowed",
          window_unscaled),
]  # fmt: skip
