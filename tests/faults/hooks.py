"""Where a fault gets hold of a loaded ONNX engine: what is written, what the decode graph is given, what it reads.

Every hook patches one instance. Shapes: B sequences, H KV heads, S new tokens, W elements of a token, N pages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.engines.base import Mode

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Writing:
    """The new tokens of one call, as they are about to be stored."""

    new: Mapping[str, Array]
    """Every array's part, (B, H, S, W), as the graph gave it."""
    positions: Array
    """Their positions, (B, S)."""
    handles: Sequence[int]
    layer: int


WriteEdit = Callable[[Array, Writing], None]
"""Changes what is stored, (B, H, S, W), in place."""
InputEdit = Callable[[Array, Sequence[int]], None]
"""Changes an input of a graph in place; the handles are those of its rows."""


def on_write(engine: Any, array: str, edit: WriteEdit, layers: Sequence[int] | None = None) -> None:
    """Change what is stored in `array` ("key_pool", say) of some layers, or of all, wherever it comes from."""
    pool, append = engine.pool, engine.pool.append

    def faulty(handles: Sequence[int], new: Mapping[str, Array]) -> None:
        tokens = next(iter(new.values())).shape[2]
        positions = np.array([pool.length(handle) for handle in handles])[:, None] + np.arange(tokens)
        changed = dict(new)
        for name, values in new.items():
            side, _, number = name.partition(".")
            if side == array and (layers is None or int(number) in layers):
                changed[name] = values.copy()
                edit(changed[name], Writing(new, positions, handles, int(number)))
        append(handles, changed)

    pool.append = faulty


def on_input(engine: Any, mode: Mode, name: str, edit: InputEdit) -> None:
    """Change an input of the prefill or of the decode graph: a page table, the lengths, the positions."""
    running = _running(engine)
    session = engine._sessions[mode]
    put = session.put

    def faulty(given: str, values: Array) -> None:
        if given == name:
            values = values.copy()
            edit(values, running)
        put(given, values)

    session.put = faulty


def on_read(engine: Any, edit: Callable[[dict[str, Array], Sequence[int]], dict[str, tuple[Any, Any]]]) -> None:
    """Change what a decode step reads, and only what it reads.

    `edit` gets the pool's arrays and the step's handles. It returns what it wants to be read in an array instead, as index and
    values by the array's name; after the step the array is as it was.
    """
    running = _running(engine)
    session = engine._sessions["decode"]
    run = session.run

    def faulty() -> None:
        arrays = engine.pool.arrays
        changes = edit(arrays, running)
        kept = {name: arrays[name][index].copy() for name, (index, _) in changes.items()}
        for name, (index, values) in changes.items():
            arrays[name][index] = values
        run()
        for name, (index, _) in changes.items():
            arrays[name][index] = kept[name]

    session.run = faulty


def on_logits(engine: Any, edit: Callable[[Array, Sequence[int]], None]) -> None:
    """Change the logits (B, V) of a decode step in place."""
    decode = engine._decode

    def faulty(handles: Sequence[int], tokens: Sequence[int]) -> Array:
        logits: Array = decode(handles, tokens).copy()
        edit(logits, handles)
        return logits

    engine._decode = faulty


def _running(engine: Any) -> list[int]:
    """The handles of the step that runs at the moment: the list that is returned is filled anew at every step."""
    if not hasattr(engine, "running_handles"):
        handles: list[int] = []
        run = engine._run

        def noting(mode: Mode, now: Sequence[int], ids: Array) -> Array:
            handles[:] = now
            logits: Array = run(mode, now, ids)
            return logits

        engine.running_handles, engine._run = handles, noting
    running: list[int] = engine.running_handles
    return running


def every(count: int) -> Callable[[], bool]:
    """Return a function that says yes at every call that is a multiple of `count`."""
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return due
