"""Time of a decode step over the length of the context."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.engines.onnx.engine import OnnxEngine

STEPS = 40
"""Timed steps at each length."""


def step_slope(engine: OnnxEngine, tokens: npt.NDArray[np.int64], contexts: Sequence[int]) -> dict[str, Any]:
    """Fit the median time of a decode step of one sequence to the length of its cache, by least squares.

    The lengths take turns of one step, STEPS times.

    Args:
        engine: The engine to time.
        tokens: (n,) token ids that fill the caches; n at least the largest context.
        contexts: Lengths of the caches in tokens.
    """
    handles = [engine.prefill([tokens[: context - STEPS].tolist()])[0] for context in contexts]
    seconds: list[list[float]] = [[] for _ in contexts]
    for step in range(STEPS):
        for i, handle in enumerate(handles):
            token = [int(tokens[contexts[i] - STEPS + step])]
            clock = time.perf_counter()
            engine.decode(handle, token)
            seconds[i].append(time.perf_counter() - clock)
    for handle in handles:
        engine.release(handle)
    steps = np.array([statistics.median(times) for times in seconds]) * 1e6
    slope, intercept = np.polyfit(contexts, steps, 1)
    residual = steps - (slope * np.array(contexts) + intercept)
    return {
        "contexts": list(contexts),
        "step_us": steps.round(1).tolist(),
        "us_per_1024_tokens": float(slope * 1024),
        "intercept_us": float(intercept),
        "r_squared": float(1 - residual.var() / steps.var()),
    }
