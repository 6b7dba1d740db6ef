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


KIND = "positions"

FAULTS = [
    Fault("rope_one_late", KIND, "decoded tokens are rotated one position late", "fp8", rotated_one_late),
    Fault("rope_after_prefix", KIND, "what follows a shared prefix is rotated from its last full page on", "fp8", after_extend),
    Fault("rope_beyond_1024", KIND, "a rotation table of 1,024 rows", "fp8", capped),
    Fault("after_192_decoded", KIND, "nothing is stored once a sequence has decoded 192 tokens", "int8", beyond_decoded(192)),
    Fault("recent_one_slot_off", KIND, "the ring of recent tokens is written one slot off", "int8_sinks", recent_one_slot_off),
    Fault("window_one_page_short", KIND, "the window ends a page too early", "fp8_windowed", window_one_page_short),
]  # fmt: skip
