"""Reference of the cache and its attention in plain torch, float32: slow, and easy to check. The kernels must agree.

Shapes: B sequences, H KV heads, Hq query heads in groups of G = Hq / H per KV head, D head_dim, W storage elements and g
stored scales of a token, T tokens of one sequence, X new tokens of all, P columns of the page table. A cache is a dict of one
layer's tensors, named and shaped as in `CacheLayout`. page_table (B, P), lengths (B) and exact_slots (B), the exact buffer of
every sequence, are int32. lengths count the tokens before the current one.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from plugins.kv_attention.layout import (
    LARGEST_BLOCK_SCALE,
    MAX_SCALE,
    MIN_SCALE,
    NVFP4_GROUP,
    PAGE_TOKENS,
    SMALLEST_BLOCK_SCALE,
    CacheLayout,
    SideLayout,
)

Cache = Mapping[str, Tensor]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of nvfp4's codes by their lower three bits; the fourth bit is the sign."""


def quantize(x: Tensor, side: SideLayout, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Quantize keys or values.

    Codes are the nearest ones, ties to even, saturating. NaN does not enter a dynamic scale; fp8 stores it as NaN of the same
    sign, integers store it as 0.

    Returns:
        Codes (..., H, W), and the scales (..., H, g) of a dynamic side or None: float16, or float8_e4m3fn of nvfp4.
    """
    nan, negative = x.isnan(), x.signbit()
    x = x.float()
    if side.exact:
        return x.to(getattr(torch, side.codes.storage)), None
    if side.layer_scale:
        assert static_scale is not None
        return _in_blocks(x, side, static_scale)
    scale = None
    if side.static:
        assert static_scale is not None
        steps = x / static_scale[:, None]
    else:
        groups, dim = side.groups(x.shape[-1]), x.shape[-1]
        grouped = x.reshape(*x.shape[:-1], groups, dim // groups)
        amax = grouped.abs().masked_fill(grouped.isnan(), 0.0).amax(-1)
        # Codes use the stored scale, rounded to float16, because decoding multiplies by that scale.
        scale = (amax / side.codes.limit).clamp(MIN_SCALE, MAX_SCALE).half()
        steps = (grouped / scale.float().unsqueeze(-1)).flatten(-2)
    steps = steps.clamp(-side.codes.limit, side.codes.limit).masked_fill(nan, 0.0)
    if side.dtype == "fp8_e4m3":
        codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = codes.masked_fill(nan, 0x7F) | negative.to(torch.uint8) << 7
        return codes.view(torch.float8_e4m3fn), scale
    codes = steps.round()
    if side.dtype == "int4":
        low, high = codes.chunk(2, dim=-1)
        codes = 16 * high + low + 8
    return codes.to(torch.int8), scale


def _in_blocks(x: Tensor, side: SideLayout, layer_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (..., D) to nvfp4: packed E2M1 codes (..., D / 2) int8 and scales (..., g) float8_e4m3fn."""
    blocks = x.reshape(*x.shape[:-1], side.groups(x.shape[-1]), NVFP4_GROUP)
    amax = blocks.abs().masked_fill(blocks.isnan(), 0.0).amax(-1)
    scale = (amax / (side.codes.limit * layer_scale)).clamp(SMALLEST_BLOCK_SCALE, LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)
    steps = (blocks / (scale.float() * layer_scale).unsqueeze(-1)).flatten(-2).nan_to_num(nan=0.0)
    magnitude = steps.abs().clamp(max=side.codes.limit)
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # Codes 0 to 4 have steps of 0.5 (up to 2), codes 4 to 6 steps of 1 (up to 4), and codes 6 and 7 a step of 2.
    codes = (magnitude / unit).round() + 2 * (unit.log2() + 1) + 8 * (steps < 0)
    low, high = codes.chunk(2, dim=-1)
    return (16 * high + low).to(torch.uint8).view(torch.int8), scale


def append(
    layout: CacheLayout,
    key_new: Tensor,
    value_new: Tensor,
    cache: Cache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    exact_slots: Tensor | None = None,
) -> None:
    """Write one new token (B, H, D) of every row into the cache, at position lengths[b]; a negative position writes nothing.

    The lengths are not changed. No two rows may write to the same place: rows are sequences, or tokens of sequences. A page
    table (B, 1) is the page of that position; an exact slot -1 - m is buffer m for a token outside the ring of recent tokens.
    """
    stored = [(b, position) for b, position in enumerate(lengths.tolist()) if position >= 0]
    for name, side, new in (("key", layout.key, key_new), ("value", layout.value, value_new)):
        codes, scales = quantize(new, side, cache.get(f"{name}_scale"))
        for b, position in stored:
            page, row = page_table[b, min(position // PAGE_TOKENS, page_table.shape[1] - 1)], position % PAGE_TOKENS
            cache[f"{name}_pool"][page, :, row] = codes[b]
            if scales is not None:
                cache[f"{name}_scale_pool"][page, :, row] = scales[b]
            if layout.exact_tokens:
                assert exact_slots is not None
                buffer = int(exact_slots[b])
                for slot in _written_slots(layout, position, newest=buffer >= 0):
                    cache[f"{name}_exact"][buffer if buffer >= 0 else -1 - buffer, :, slot] = new[b].float().half()


def dequantize(layout: CacheLayout, cache: Cache, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values that the pages of one sequence hold, each (H, T, D) float32 with T = length."""
    pages = pages[: -(-length // PAGE_TOKENS)]

    def rows(name: str) -> Tensor:
        """Return the sequence's rows (H, T, W) of a pool (N, H, 64, W)."""
        return cache[name][pages].movedim(1, 0).flatten(1, 2)[:, :length]

    def side(name: str, form: SideLayout) -> Tensor:
        codes = rows(f"{name}_pool")
        if form.dtype == "int4":
            codes = torch.cat([(codes & 15) - 8, codes >> 4], -1)
        if form.layer_scale:
            byte = codes.view(torch.uint8)
            code = torch.cat([byte & 15, byte >> 4], -1)
            magnitude = torch.tensor(E2M1, device=code.device)[(code % 8).long()]
            steps = rows(f"{name}_scale_pool").float() * cache[f"{name}_scale"]
            return torch.where(code >= 8, -magnitude, magnitude) * steps.repeat_interleave(NVFP4_GROUP, -1)
        if form.static:
            return codes.float() * cache[f"{name}_scale"][:, None, None]
        if form.dynamic:
            scales = rows(f"{name}_scale_pool").float()
            return codes.float() * scales.repeat_interleave(layout.head_dim // scales.shape[-1], -1)
        return codes.float()

    return side("key", layout.key), side("value", layout.value)


def attend(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Cache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scaling: float,
    query_starts: Tensor | None = None,
    exact_slots: Tensor | None = None,
) -> Tensor:
    """Run the attention of every sequence's new tokens, one or several, before any is appended.

    A query attends to the sinks and the recent tokens from the exact buffers, to all other tokens from the pages, as a token
    at position lengths[b] reads them, and to the new tokens up to its own, unquantized. `query_starts` (B + 1): the first new
    token of every sequence, and X; None: every sequence has X / B.

    Returns:
        (X, Hq, D) float32.
    """
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    starts = range(0, len(query) + 1, len(query) // len(lengths)) if query_starts is None else query_starts.tolist()
    spans = list(pairwise(starts))
    for b, length in enumerate(lengths.tolist()):
        new = slice(*spans[b])
        sides = list(dequantize(layout, cache, page_table[b], length))
        positions, slots = exact_places(layout, length)
        for i, (name, states) in enumerate((("key", key_new), ("value", value_new))):
            if positions:
                assert exact_slots is not None
                sides[i][:, positions] = cache[f"{name}_exact"][exact_slots[b]][:, slots].float()
            sides[i] = torch.cat([sides[i], states[new].transpose(0, 1).float()], 1)
        key, value = (states.repeat_interleave(query.shape[1] // layout.kv_heads, 0) for states in sides)
        rows = query[new].transpose(0, 1).float()
        scores = rows @ key.mT * scaling
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(length)
        out[new] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1)
    return out


def exact_places(layout: CacheLayout, length: int) -> tuple[list[int], list[int]]:
    """Return the positions that a token at position `length` reads from the exact buffer, and their slots."""
    sink, recent = layout.sink_tokens, layout.recent_tokens
    sinks = list(range(min(sink, length)))
    newest = list(range(max(sink, length - recent), length)) if recent else []
    return sinks + newest, sinks + [sink + p % recent for p in newest]


def _written_slots(layout: CacheLayout, position: int, *, newest: bool) -> list[int]:
    """Slots of the exact buffer that the token at `position` is written to; a sink is also a recent token at first."""
    sink, recent = layout.sink_tokens, layout.recent_tokens
    return [position] * (position < sink) + ([sink + position % recent] if recent and newest else [])
