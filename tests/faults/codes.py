"""Codes: rounded, clipped, packed, rotated or stored in another way, or in another place, than they were meant."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Edit, Plant, Step, write, zero


def _some(x: Array, share: int) -> Any:
    """One element in `share`, the same at every call: where a number's rounding went another way, for all that is known."""
    index = np.arange(x.size, dtype=np.uint64).reshape(x.shape)
    mixed: Array = (index * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % np.uint64(share) == 0
    return mixed


def towards_zero(x: Array, _: Step) -> Any:
    """Of whole numbers, half of them."""
    return x - np.where(_some(x, 2), np.sign(x), 0)


def magnitude_less(x: Array, _: Step) -> Any:
    """Of floating-point codes half of the numbers are the next smaller one."""
    return np.where(_some(x, 2) & ((x & 0x7F) > 0), x - 1, x)


def nibbles_swapped(x: Array, _: Step) -> Any:
    high, low = _unpacked(x)
    return _packed(low, high)


def from_new(array: str, edit: Callable[[Array], Array] = lambda x: x) -> Edit:
    """What the graph gave of another array, "value_pool.2"."""
    return lambda _, step: edit(step.memo["new"][array])


def not_rotated(side: str) -> Plant:
    """One layer's numbers are stored as they are, while the other factor of their product is rotated."""

    def plain(step: Step) -> tuple[Array, Array]:
        codes, scale = (step.memo["new"][f"{side}_{name}.1"] for name in ("pool", "scale_pool"))
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < codes.shape[-1]:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        x = (codes * scale.astype(np.float32)) @ (matrix / np.sqrt(len(matrix)))
        unit = np.abs(x).max(-1, keepdims=True) / 127
        return np.round(x / np.maximum(unit, 1e-6)), unit

    codes = write(side, lambda _, step: plain(step)[0], layers=[1])
    return codes + write(f"{side}_scale", lambda _, step: plain(step)[1], layers=[1])


def _unpacked(packed: Array) -> tuple[Array, Array]:
    """The signed numbers of bytes as stages.engines.paged.layout packs them: the upper four bits, and the lower."""
    unsigned = packed.view(np.uint8).astype(np.int16)
    return ((unsigned >> 4) ^ 8) - 8, (unsigned & 15) - 8


def _packed(high: Array, low: Array) -> Any:
    high, low = np.clip(high, -8, 7), np.clip(low, -8, 7)
    packed: Array = (((high & 15) << 4) | (low + 8)).astype(np.uint8).view(np.int8)
    return packed


def channels(edit: Callable[[Array], Any], *which: int) -> Edit:
    """Change some channels alone."""

    def changed(x: Array, _: Step) -> Any:
        x = x.copy()
        x[..., which] = edit(x[..., which])
        return x

    return changed


def swapped(x: Array, _: Step) -> Any:
    """Halves of a vector as pairs: the other convention of rotary embeddings."""
    size = x.shape[-1]
    return x[..., np.arange(size).reshape(2, -1).T.ravel()]


def in_prompt(step: Step) -> Any:
    return step.ids.shape[1] > 1


def decoding(step: Step) -> Any:
    return step.mode == "decode"


def index_in_chunk(step: Step) -> Any:
    return np.arange(step.ids.shape[1])


of = partial(Fault, "codes")

FAULTS = [
    of("truncated", "int8", "codes rounded towards zero: a cast in place of a rounding", write("key value", towards_zero),
       "conformance"),
    of("fp8_truncated", "fp8", "FP8 codes are cut off by a shift and a mask, as vLLM's CPU path does",
       write("key value", magnitude_less), "conformance"),
    of("clipped_at_112", "int8", "codes saturate at 7/8 of their range", write("key", lambda x, _: np.clip(x, -112, 112))),
    of("largest_wraps", "int8", "the largest code wraps around to the smallest",
       write("value", lambda x, _: np.where(x == 127, -127, x), layers=[1])),
    of("subnormals_flushed", "fp8", "FP8 subnormals become zero",
       write("key value", lambda x, _: np.where((x & 0x7F) < 0x08, 0, x)), "conformance"),
    of("bit_flips", "int8", "a bit of one channel flips in one token of 50: memory without ECC",
       write("value", channels(lambda x: x ^ 0x40, 3), lambda s: s.positions % 50 == 17, layers=[2])),
    of("last_channels_unwritten", "int8", "a vectorized copy leaves the last 16 channels of a head out",
       write("value", channels(np.zeros_like, *range(48, 64)), layers=[0])),
    of("rotary_pairs", "fp8", "one layer's keys are stored in the other order of rotary pairs",
       write("key", swapped, layers=[2])),
    of("values_hold_keys", "int8", "one layer stores its keys for values",
       write("value", from_new("key_pool.3"), layers=[3]) + write("value_scale", from_new("key_scale_pool.3"), layers=[3])),
    of("values_of_next_layer", "int8", "one layer stores the values of the next one",
       write("value", from_new("value_pool.2"), layers=[1]) + write("value_scale", from_new("value_scale_pool.2"), layers=[1])),
    of("heads_swapped_in_decode", "fp8", "decode stores one layer's heads in reverse order",
       write("key", lambda x, _: x[:, ::-1], decoding, layers=[1]), "conformance"),
    of("head_0_for_all", "fp8", "all heads of one layer store the first one's values: GQA's mapping",
       write("value", lambda x, _: np.broadcast_to(x[:, :1], x.shape), layers=[2])),
    of("nibbles_swapped_sometimes", "fp8k_int4v", "a byte's two codes swapped in every other token of one layer",
       write("value", nibbles_swapped, lambda s: s.positions % 2 == 1, layers=[3])),
    of("high_nibble_lost", "fp8k_int4v", "the upper code of a byte is masked away in decode",
       write("value", lambda x, _: x & 0x0F, decoding)),
    of("zero_point_of_other_head", "int8_asym", "one layer's key zero points in the order of another layout",
       write("key_zero", lambda x, _: x[:, ::-1], layers=[2]), engine="graph"),
    of("keys_not_rotated", "int8_hadamard", "one layer's keys are stored unrotated, its queries are rotated",
       not_rotated("key")),
    of("prompts_last_token_unwritten", "fp8", "the last token of a prompt's chunk is not stored",
       write("key value", zero, lambda s: in_prompt(s) & (index_in_chunk(s) == s.ids.shape[1] - 1))),
    of("first_token_unwritten", "fp8", "a sequence's first token is not stored: the sink of attention",
       write("key value", zero, lambda s: s.positions == 0)),
    of("prompt_tail_unwritten", "int8", "a prompt's tokens beyond a multiple of 16 are not stored in one head",
       write("value", zero, lambda s: in_prompt(s) & (index_in_chunk(s) >= s.ids.shape[1] // 16 * 16), layers=[2], heads=[1])),
    of("rows_stored_crosswise", "int8", "rows of a decode step store each other's keys",
       write("key key_scale", lambda x, _: np.roll(x, 1, axis=0), decoding, layers=[0])),
]  # fmt: skip
