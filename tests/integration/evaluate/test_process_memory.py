"""Detection of memory that an engine uses but does not report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.evaluate.decoding.system import process_memory
from stages.verdict.engine_tests import ProcessMemory


def stable_memory(engine: OnnxEngine) -> ProcessMemory:
    """Measure until a measurement is conclusive: memory that earlier tests freed may be returned meanwhile."""
    measurements = (process_memory(engine, 1024) for _ in range(5))
    stable = next((memory for memory in measurements if memory is not None and memory.inconclusive is None), None)
    assert stable is not None, "the process's memory did not become stable"
    return stable


def test_an_unreported_float16_copy_is_detected(int8: Path) -> None:
    engine = load_engine(int8, threads=1)
    assert not stable_memory(engine).excess_mib
    append, release = engine.pool.append, engine.pool.release
    shadow: dict[int, Any] = {}

    def append_with_copy(handles: Sequence[int], new: Any) -> None:
        for row, handle in enumerate(handles):
            codes = [values[row] for name, values in new.items() if name.startswith(("key_pool", "value_pool"))]
            shadow.setdefault(handle, []).append([part.astype(np.float16) for part in codes])
        append(handles, new)

    def release_with_copy(handle: int) -> None:
        shadow.pop(handle, None)
        release(handle)

    engine.pool.append, engine.pool.release = append_with_copy, release_with_copy  # type: ignore[method-assign]
    assert stable_memory(engine).excess_mib
