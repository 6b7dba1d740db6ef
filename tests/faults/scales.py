"""Scales: of another place, of another precision, of another moment, or not there at all."""

from typing import Any

import numpy as np

from faults.fault import Fault, Plant
from faults.hooks import Array, Writing, on_write


def static(side: str, factor: float, layer: int | None = None, head: int | None = None) -> Plant:
    """Multiply the static scales that a side is read with, of one layer or head or of all."""

    def plant(engine: Any) -> None:
        for name, values in engine._constants.items():
            if name.startswith(f"{side}_scale.") and (layer is None or name.endswith(f".{layer}")):
                values[:, slice(None) if head is None else head] *= factor

    return plant


def stored(side: str, factor: float, layer: int | None = None, head: int | None = None) -> Plant:
    """Multiply the scales that are stored beside the codes."""

    def edit(values: Array, _: Writing) -> None:
        values[:, slice(None) if head is None else head] *= np.float16(factor)

    return lambda engine: on_write(engine, f"{side}_scale_pool", edit, None if layer is None else [layer])


def merged(engine: Any) -> None:
    """One scale for both sides, the larger one, as checkpoints with a single kv_scale have."""
    for layer in range(engine.shape.layers):
        key, value = engine._constants[f"key_scale.{layer}"], engine._constants[f"value_scale.{layer}"]
        key[...] = value[...] = np.maximum(key, value)


def swapped_heads(engine: Any) -> None:
    for values in (v for name, v in engine._constants.items() if name.endswith(".1")):
        values[...] = values[:, ::-1].copy()


def swapped_groups(engine: Any) -> None:
    def edit(values: Array, _: Writing) -> None:
        values[:, 0] = values[:, 0, :, ::-1].copy()

    on_write(engine, "value_scale_pool", edit, [2])


def frozen(engine: Any) -> None:
    """The scale of a page's first token for all of its tokens, whose codes belong to their own."""
    first: dict[tuple[int, int], Array] = {}

    def edit(values: Array, writing: Writing) -> None:
        for row, handle in enumerate(writing.handles):
            for token, position in enumerate(writing.positions[row]):
                key = (handle, writing.layer)
                if position % 64 == 0 or key not in first:
                    first[key] = values[row, :, token].copy()
                values[row, :, token] = first[key]

    on_write(engine, "value_scale_pool", edit)


def eight_bit(engine: Any) -> None:
    """Scales of eight significant bits, as bfloat16 has them."""

    def edit(values: Array, _: Writing) -> None:
        values.view(np.uint16)[...] &= 0xFFF8

    on_write(engine, "key_scale_pool", edit)


def both_sides_doubled(engine: Any) -> None:
    """Read keys and values with twice their scales."""
    for side in ("key", "value"):
        static(side, 2)(engine)


KIND = "scales"

FAULTS = [
    Fault("key_scale_head_x1_25", KIND, "one head's scale is a stale calibration's", "int8", stored("key", 1.25, 2, 0)),
    Fault("key_scale_layer_x1_05", KIND, "one layer's scale was rounded in its file", "fp8", static("key", 1.05, 1)),
    Fault("fnuz_scales", KIND, "E4M3FNUZ codes read as E4M3FN: every number doubled (AMD and NVIDIA FP8)", "fp8",
          both_sides_doubled),
    Fault("values_x1_02_layer", KIND, "one layer's value scale was rounded in its file", "fp8", static("value", 1.02, 3)),
    Fault("sides_merged", KIND, "one kv_scale for both, the larger, while the codes were made with two", "fp8", merged),
    Fault("heads_swapped", KIND, "one layer's per-head scales in the order of another layout", "fp8_head", swapped_heads),
    Fault("groups_swapped", KIND, "two groups' scales change places in one head", "int8_groups", swapped_groups),
    Fault("page_scale_frozen", KIND, "a page keeps the scale of its first token", "int8", frozen),
    Fault("scale_eight_bits", KIND, "scales pass through bfloat16", "int8", eight_bit),
]  # fmt: skip
