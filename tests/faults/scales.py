"""Scales: of another place, of another precision, of another moment, or not there at all."""

from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, static, times, write


def merged(engine: Any) -> None:
    """One scale for both sides, the larger one, as checkpoints with a single kv_scale have."""
    for layer in range(engine.shape.layers):
        key, value = engine._constants[f"key_scale.{layer}"], engine._constants[f"value_scale.{layer}"]
        key[...] = value[...] = np.maximum(key, value)


def of_layer(side: str, other: Any) -> Plant:
    """Decode reads layer i with the static scale of layer `other(i)`."""

    def apply(engine: Any) -> None:
        scales = [engine._constants[f"{side}_scale.{layer}"].copy() for layer in range(engine.shape.layers)]
        for layer in range(len(scales)):
            static(side, lambda _, layer=layer: scales[other(layer) % len(scales)], [layer], "decode").apply(engine)  # type: ignore[misc]

    return Plant(f"static {side} scales of decode", apply)


def frozen(x: Array, step: Step) -> Any:
    """The scale of a page's first token for all of its tokens, whose codes belong to their own."""
    for row, handle in enumerate(step.handles):
        for token, position in enumerate(step.positions[row]):
            key = (handle, step.memo["layer"])
            if position % 64 == 0 or key not in step.memo:
                step.memo[key] = x[row, :, token].copy()
            x[row, :, token] = step.memo[key]
    return x


def first_ever(x: Array, step: Step) -> Any:
    """The largest scale of the engine's first prompt, for all that come: a warm-up on whatever was there."""
    key = ("first", step.memo["layer"])
    step.memo.setdefault(key, x[:1].max(axis=2, keepdims=True))
    return np.broadcast_to(step.memo[key], x.shape)


def eight_bits(x: Array, _: Step) -> Any:
    return (x.view(np.uint16) & np.uint16(0xFFF8)).view(x.dtype)


def power_of_two(x: Array, _: Step) -> Any:
    return np.exp2(np.ceil(np.log2(x.astype(np.float32))))


def drifting(x: Array, step: Step) -> Any:
    """What is read with a scale that grows by a tenth in every 100 steps."""
    return x * (1 + step.number // 100 * 0.1)


of = partial(Fault, "scales")

FAULTS = [
    of("key_scale_head_x1_25", "int8", "one head's scale is a stale calibration's",
       write("key_scale", times(1.25), layers=[2], heads=[0]), "conformance"),
    of("key_scale_layer_x1_05", "fp8", "one layer's scale was rounded in its file", static("key", lambda x: x * 1.05, [1]),
       "conformance"),
    of("values_x1_02_layer", "fp8", "one layer's value scale was rounded in its file", static("value", lambda x: x * 1.02, [3]),
       "conformance"),
    of("fnuz_scales", "fp8", "E4M3FNUZ codes read as E4M3FN: every number doubled (AMD and NVIDIA FP8)",
       static("key", lambda x: x * 2) + static("value", lambda x: x * 2)),
    of("sides_merged", "fp8", "one kv_scale for both, the larger, while the codes were made with two",
       Plant("static key and value scales", merged)),
    of("scales_are_one", "fp8", "scales that are missing are taken as 1.0, silently",
       static("key", np.ones_like, mode="decode") + static("value", np.ones_like, mode="decode")),
    of("decode_key_scale_x1_1", "fp8", "decode reads one layer's keys with another calibration's scale",
       static("key", lambda x: x * 1.1, [2], "decode")),
    of("scales_one_layer_late", "fp8", "decode reads every layer with the scale of the layer before",
       of_layer("key", lambda layer: layer - 1)),
    of("prefill_scale_x1_5", "fp8", "later chunks of a prompt read keys with another scale than decode",
       static("key", lambda x: x * 1.5, mode="prefill")),
    of("heads_swapped", "fp8_head", "one layer's per-head scales in the order of another layout",
       static("key", lambda x: x[:, ::-1].copy(), [1]) + static("value", lambda x: x[:, ::-1].copy(), [1])),
    of("groups_swapped", "int8_groups", "two groups' scales change places in one head",
       write("value_scale", lambda x, _: x[..., ::-1], layers=[2], heads=[0])),
    of("page_scale_frozen", "int8", "a page keeps the scale of its first token", write("value_scale", frozen)),
    of("scale_of_warm_up", "int8", "scales are those of the first prompt that came: a poisoned warm-up",
       write("value_scale", first_ever, layers=[0])),
    of("scale_eight_bits", "int8", "scales pass through bfloat16", write("key_scale", eight_bits), "conformance"),
    of("scale_power_of_two", "int8", "scales are rounded up to powers of two, codes are not",
       write("value_scale", power_of_two)),
    of("scale_over_128", "int8", "scales of a range of 128 beside codes of a range of 127",
       write("key_scale value_scale", times(127 / 128)), "conformance"),
    of("scale_of_token_before", "int8", "a token of a prompt has the scale of the one before it",
       write("value_scale", lambda x, _: np.roll(x, 1, axis=2), layers=[1])),
    of("scale_lost_at_page_starts", "int8", "the scale of a page's first token is not written",
       write("key_scale", lambda x, _: x * 0, lambda s: s.positions % 64 == 0)),
    of("int4_scale_of_eight", "fp8k_int4v", "4-bit scales of a range of 8 beside codes of a range of 7",
       write("value_scale", times(7 / 8))),
    of("scale_drifts", "int8", "the scale of new values grows while the engine serves", write("value_scale", drifting)),
    of("zero_of_token_before", "int8_asym", "a token of a prompt has the zero point of the one before it",
       write("value_zero", lambda x, _: np.roll(x, 1, axis=2), layers=[2])),
]  # fmt: skip
