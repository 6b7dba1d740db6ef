"""Faults of codes: rounded, clipped, packed, rotated or stored in another way or place than intended."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Edit, Step, write


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


def channels(edit: Callable[[Array], Any], *which: int) -> Edit:
    """Change only some channels."""

    def changed(x: Array, _: Step) -> Any:
        x = x.copy()
        x[..., which] = edit(x[..., which])
        return x

    return changed


def swapped(x: Array, _: Step) -> Any:
    """Interleave the halves of a vector into pairs: the other convention of rotary embeddings."""
    size = x.shape[-1]
    return x[..., np.arange(size).reshape(2, -1).T.ravel()]


def decoding(step: Step) -> Any:
    return step.mode == "decode"


of = partial(Fault, "codes")

FAULTS = [
    of("truncated", "int8", "codes rounded towards zero: a cast instead of a rounding", write("key value", towards_zero),
       "conformance"),
    of("fp8_truncated", "fp8", "FP8 codes are cut off by a shift and a mask, as vLLM's CPU path does",
       write("key value", magnitude_less), "conformance"),
    of("clipped_at_112", "int8", "codes saturate at 7/8 of their range", write("key", lambda x, _: np.clip(x, -112, 112))),
    of("subnormals_flushed", "fp8", "FP8 subnormals become zero",
       write("key value", lambda x, _: np.where((x & 0x7F) < 0x08, 0, x)), "conformance"),
    of("rotary_pairs", "fp8", "one layer's keys are stored in the other order of rotary pairs",
       write("key", swapped, layers=[2])),
    of("heads_swapped_in_decode", "fp8", "decode stores one layer's heads in reverse order",
       write("key", lambda x, _: x[:, ::-1], decoding, layers=[1]), "conformance"),
]  # fmt: skip
