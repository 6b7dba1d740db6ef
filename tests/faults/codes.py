"""Faults of codes: rounded, clipped, packed, rotated or stored in another way or place than intended."""

from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Step, write


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


of = partial(Fault, "codes")

FAULTS = [
    of("truncated", "codes rounded towards zero: a cast instead of a rounding", write("key value", towards_zero)),
    of("fp8_truncated", "FP8 codes are cut off by a shift and a mask, as vLLM's CPU path does",
       write("key value", magnitude_less)),
    of("subnormals_flushed", "FP8 subnormals become zero",
       write("key value", lambda x, _: np.where((x & 0x7F) < 0x08, 0, x))),
]  # fmt: skip
