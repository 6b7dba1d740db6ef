"""Codes: rounded, clipped, packed, rotated or read in another way than they were meant."""

from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Writing, on_write

KEYS_AND_VALUES = ("key_pool", "value_pool")


def _halves(values: Array) -> Array:
    """Half of the elements, the same at every call: where a number's rounding went away from zero, for all that is known."""
    index = np.arange(values.size, dtype=np.uint64).reshape(values.shape)
    return (index * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63)).astype(bool)


def truncated(engine: Any) -> None:
    def edit(values: Array, _: Writing) -> None:
        values -= np.where(_halves(values), np.sign(values), 0).astype(values.dtype)

    for array in KEYS_AND_VALUES:
        on_write(engine, array, edit)


def clipped(engine: Any) -> None:
    def edit(values: Array, _: Writing) -> None:
        np.clip(values, -112, 112, out=values)

    on_write(engine, "key_pool", edit)


def subnormals_flushed(engine: Any) -> None:
    def edit(values: Array, _: Writing) -> None:
        values[(values & 0x7F) < 0x08] = 0

    for array in KEYS_AND_VALUES:
        on_write(engine, array, edit)


def nibbles_swapped_at_odd_tokens(engine: Any) -> None:
    def edit(values: Array, writing: Writing) -> None:
        high, low = _unpacked(values)
        odd = (writing.positions % 2 == 1)[:, None, :, None]
        values[...] = np.where(odd, _packed(low, high), values)

    on_write(engine, "value_pool", edit, [3])


def zero_of_the_other_head(engine: Any) -> None:
    def edit(values: Array, _: Writing) -> None:
        values[...] = values[:, ::-1].copy()

    on_write(engine, "key_zero_pool", edit, [2])


def keys_not_rotated(engine: Any) -> None:
    """The keys are stored as they are, while queries are rotated."""
    size = engine.shape.head_dim
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = matrix / np.sqrt(size)

    def plain(writing: Writing) -> tuple[Array, Array]:
        codes, scale = (writing.new[f"key_{name}.{writing.layer}"] for name in ("pool", "scale_pool"))
        keys = (codes * scale.astype(np.float32)) @ matrix
        steps = np.abs(keys).max(-1, keepdims=True) / 127
        return np.round(keys / np.maximum(steps, 1e-6)), steps

    def edit_codes(values: Array, writing: Writing) -> None:
        values[...] = plain(writing)[0]

    def edit_scales(values: Array, writing: Writing) -> None:
        values[...] = plain(writing)[1]

    on_write(engine, "key_pool", edit_codes, [1])
    on_write(engine, "key_scale_pool", edit_scales, [1])


def _unpacked(packed: Array) -> tuple[Array, Array]:
    """The signed numbers of bytes as stages.engines.paged.layout packs them: the upper four bits, and the lower."""
    unsigned = packed.view(np.uint8).astype(np.int16)
    return ((unsigned >> 4) ^ 8) - 8, (unsigned & 15) - 8


def _packed(high: Array, low: Array) -> Array:
    high, low = np.clip(high, -8, 7), np.clip(low, -8, 7)
    packed: Array = (((high & 15) << 4) | (low + 8)).astype(np.uint8).view(np.int8)
    return packed


KIND = "codes"

FAULTS = [
    Fault("truncated", KIND, "codes rounded towards zero: a cast in place of a rounding", "int8", truncated),
    Fault("clipped_at_112", KIND, "codes saturate at 7/8 of their range", "int8", clipped),
    Fault("subnormals_flushed", KIND, "FP8 subnormals become zero", "fp8", subnormals_flushed),
    Fault("nibbles_swapped_sometimes", KIND, "a byte's two codes swapped in every other token of one layer",
          "fp8k_int4v", nibbles_swapped_at_odd_tokens),
    Fault("zero_point_of_other_head", KIND, "one layer's key zero points in the order of another layout", "int8_asym",
          zero_of_the_other_head, engine="graph"),
    Fault("keys_not_rotated", KIND, "one layer's keys are stored unrotated, its queries are rotated", "int8_hadamard",
          keys_not_rotated),
]  # fmt: skip
