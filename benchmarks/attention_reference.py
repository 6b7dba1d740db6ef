"""The kernels' cache and attention in plain torch, with the reference engine's arithmetic. The kernels must agree with it.

Shapes: B sequences, H KV heads, Hq query heads in groups of G = Hq / H per KV head, D head_dim, W storage elements and g
stored scales of a token, T tokens of one sequence, X new tokens of all, P columns of the page table. A cache is a dict of one
layer's tensors, named and shaped as in `CacheLayout`. page_table (B, P), lengths (B) and exact_slots (B), the exact buffer of
every sequence, are int32. lengths count the tokens before the current one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout, SideLayout
from stages.engines.reference import formats
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.formats import Format, ScaleSource

Cache = Mapping[str, Tensor]


def format_of(side: SideLayout) -> Format:
    """Return the equal format of a policy."""
    scale: ScaleSource = "none" if side.exact else "calibrated" if side.has_static_scales else "dynamic"
    return Format(dtype=side.dtype, granularity=side.granularity, group_size=side.group_size, scale=scale)


def quantize(x: Tensor, side: SideLayout, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Quantize keys or values x (..., H, D), as the reference engine does.

    The kernels are also given NaN, which does not enter a dynamic scale; fp8 stores it as NaN of the same sign, integers store
    it as 0.

    Returns:
        Codes (..., H, W), and the scales (..., H, g) of a dynamic side or None: float16, or float8_e4m3fn of nvfp4.
    """
    nan = x.isnan()
    numbers = x if side.exact else x.masked_fill(nan, 0.0)
    stored = formats.quantize(numbers.unsqueeze(-2), format_of(side), _static(static_scale))
    codes, scale = stored.codes.squeeze(-2), stored.scale
    if side.dtype == "fp8_e4m3":
        codes.view(torch.uint8)[nan] = 0x7F + 0x80 * x[nan].signbit().to(torch.uint8)
    return codes, None if scale is None else scale.squeeze(-2)


def _static(scale: Tensor | None) -> Static | None:
    return None if scale is None else Static(scale.view(-1, 1, 1), None)


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
        stored = Stored(rows(f"{name}_pool"), rows(f"{name}_scale_pool") if form.dynamic else None, None)
        return formats.dequantize(stored, format_of(form), _static(cache.get(f"{name}_scale")))

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
    exact_slots: Tensor | None = None,
) -> Tensor:
    """Run the attention of every sequence's new tokens, one or several, before any is appended.

    A query attends to the sinks and the recent tokens from the exact buffers, to all other tokens from the pages, as a token
    at position lengths[b] reads them, and to the new tokens up to its own, unquantized. Every sequence has X / B new tokens.

    Returns:
        (X, Hq, D) float32.
    """
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    tokens = len(query) // len(lengths)
    for b, length in enumerate(lengths.tolist()):
        new = slice(b * tokens, (b + 1) * tokens)
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
