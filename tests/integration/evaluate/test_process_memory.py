"""Memory of the engine's process that the engine does not report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.evaluate.decoding.system import process_memory
from stages.verdict.engine_tests import ProcessMemory


def sure_memory(engine: OnnxEngine) -> ProcessMemory:
    """Measure until the process's memory is stable: memory that earlier tests freed may still be returned."""
    measured = (process_memory(engine, 1024) for _ in range(5))
    sure = next((found for found in measured if found is not None and found.inconclusive is None), None)
    assert sure is not None, "it never stood still"
    return sure


def test_an_unreported_float16_copy_shows_in_process_memory(int8: Path) -> None:
    engine = load_engine(int8, threads=1)
    assert not sure_memory(engine).excess_mib
    append, release = engine.pool.append, engine.pool.release
    shadow: dict[int, Any] = {}

    def keeping(handles: Sequence[int], new: Any) -> None:
        for row, handle in enumerate(handles):
            codes = [values[row] for name, values in new.items() if name.startswith(("key_pool", "value_pool"))]
            shadow.setdefault(handle, []).append([part.astype(np.float16) for part in codes])
        append(handles, new)

    def letting_go(handle: int) -> None:
        shadow.pop(handle, None)
        release(handle)

    engine.pool.append, engine.pool.release = keeping, letting_go  # type: ignore[method-assign]
    assert sure_memory(engine).excess_mib
