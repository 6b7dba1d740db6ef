"""Serving: batches, forks, prefixes, generation, and what happens rarely or late."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Writing, every, on_input, on_logits, on_read, on_write


def rows_from(first: int) -> Any:
    """Rows of a batch from `first` on read the pages of the rows before."""

    def plant(engine: Any) -> None:
        def edit(table: Array, _: Sequence[int]) -> None:
            if len(table) > first:
                table[first:] = table[np.arange(len(table) - first) % first]

        on_input(engine, "decode", "page_table", edit)

    return plant


def logits_swapped(engine: Any) -> None:
    def edit(logits: Array, _: Sequence[int]) -> None:
        if len(logits) == 13:
            logits[[0, 1]] = logits[[1, 0]]

    on_logits(engine, edit)


def buffers_not_forked(engine: Any) -> None:
    """A fork starts with whatever its exact buffer held before."""
    fork = engine.pool.fork

    def faulty(handle: int) -> int:
        child: int = fork(handle)
        buffer = engine.pool.sequences[child].buffer
        for name in ("key_exact", "value_exact"):
            for layer in range(engine.shape.layers):
                engine.pool.arrays[f"{name}.{layer}"][buffer] = 0
        return child

    engine.pool.fork = faulty


def prefix_token_skipped(engine: Any) -> None:
    """The first token after a shared prefix is left out where another one follows."""
    extend = engine.extend
    engine.extend = lambda sequence, tokens: extend(sequence, tokens[1:] if len(tokens) > 1 else tokens)


def generate_otherwise(engine: Any) -> None:
    """The loop of `generate` reads keys with another scale than `decode` does."""
    generate, gains = engine.generate, engine._constants

    def faulty(*given: Any, **options: Any) -> Any:
        names = [name for name in gains if name.startswith("key_scale.")]
        for name in names:
            gains[name] *= 1.5
        try:
            return generate(*given, **options)
        finally:
            for name in names:
                gains[name] /= 1.5

    engine.generate = faulty


def nan_rarely(engine: Any) -> None:
    """One head of one sequence is NaN in one step of 2,000."""
    due = every(2000)

    def edit(logits: Array, _: Sequence[int]) -> None:
        if due():
            logits[0] = np.nan

    on_logits(engine, edit)


def late_request(engine: Any) -> None:
    """From the 150th sequence on one head's values are zero."""

    def edit(values: Array, writing: Writing) -> None:
        for row, handle in enumerate(writing.handles):
            if handle >= 150:
                values[row, 0] = 0

    on_write(engine, "value_pool", edit, [2])


def zeros_rarely(engine: Any) -> None:
    """One layer reads zeros for values in one step of 500: a copy that was not awaited."""
    due = every(500)

    def edit(arrays: dict[str, Array], handles: Sequence[int]) -> dict[str, tuple[Any, Any]]:
        if not due():
            return {}
        pages = sorted({page for handle in handles for page in engine.pool.sequences[handle].pages})
        return {"value_pool.2": (pages, np.zeros_like(arrays["value_pool.2"][pages]))}

    on_read(engine, edit)


def warmed_up(engine: Any) -> None:
    """The first 40 decode steps read keys that are half as large: buffers that are filled while requests are served already."""
    steps = 0

    def edit(logits: Array, _: Sequence[int]) -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            for name in (name for name in engine._constants if name.startswith("key_scale.")):
                engine._constants[name] *= 2
        del logits

    for name in (name for name in engine._constants if name.startswith("key_scale.")):
        engine._constants[name] *= 0.5
    on_logits(engine, edit)


KIND = "serving"

FAULTS = [
    Fault("rows_above_16", KIND, "rows of a batch from 16 on read other rows' pages: a grid of fixed size", "fp8",
          rows_from(16)),
    Fault("logits_swapped", KIND, "two rows get each other's logits in batches of 13", "int8", logits_swapped),
    Fault("fork_without_buffers", KIND, "a fork does not take sinks and recent tokens with it", "int8_sinks",
          buffers_not_forked),
    Fault("prefix_token_skipped", KIND, "the first token after a shared prefix is skipped", "fp8", prefix_token_skipped),
    Fault("generate_another_scale", KIND, "generate runs another kernel than decode, with another scale", "fp8",
          generate_otherwise),
    Fault("nan_rarely", KIND, "logits are NaN in one step of 2,000", "fp8", nan_rarely, rare=True),
    Fault("zeros_rarely", KIND, "one layer's values are zero in one step of 500", "int8", zeros_rarely, rare=True),
    Fault("from_request_150_on", KIND, "one head's values are lost from the 150th request on", "int8", late_request, rare=True),
    Fault("first_40_steps", KIND, "the first 40 decode steps read keys of half the size", "fp8", warmed_up),
]  # fmt: skip
