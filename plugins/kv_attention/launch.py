"""Launches of the kernels on torch tensors: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

Kernels compute addresses from shapes, and the append writes there, so every tensor is checked against the layout before a
launch. The checks look at shapes, types, strides and addresses only, never at contents, so that a CUDA graph can capture them.

Shapes: L layers, B sequences, H KV heads, Hq query heads, D head_dim, N pages, M exact buffers, P columns of the page table,
K programs over the pages of a KV head, Y all its programs, R parts, E exact slots, X new tokens of all sequences, S splits.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugins.kv_attention.checks import INT32, check, check_counts, check_launch
from plugins.kv_attention.kernels.append import append as append_kernel
from plugins.kv_attention.kernels.attend import reduce_parts
from plugins.kv_attention.kernels.context import SPLIT_TOKENS, context_partial
from plugins.kv_attention.kernels.decode import decode_partial, plan_work
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout
from plugins.kv_attention.variants import (
    Setting,
    Variant,
    append_variant,
    context_blocks,
    context_splits,
    context_variant,
    decode_variant,
    partial_dtype,
    plan_grid,
    plan_variant,
    reduce_variant,
    work_rows,
)

INTERPRETED_PROGRAMS = 4
"""Programs of all KV heads in the interpreter, which runs them one by one: a few, so that there are parts to reduce."""


class DecodePlan(NamedTuple):
    """Work list of a decode step (kernels/decode.py). All layers with the same number of exact tokens share it."""

    work: Tensor
    """(Y, 5) int32: sequences and pages of every program."""
    sequences: Tensor
    """(B, 4) int32: pages and parts of every sequence."""


def choose_programs(batch: int, kv_heads: int, max_pages: int, sm_count: int, resident: int) -> int:
    """Return K, the largest number of programs per KV head that run at once for all heads, at most one per page.

    The number is rounded down, because a few more programs would run afterwards and double the time. It depends on shapes only,
    so that a CUDA graph can capture the launch. `resident`: programs that one SM runs at once.
    """
    return max(1, min(sm_count * resident // kv_heads, batch * max_pages))


def default_programs(layout: CacheLayout, query: Tensor, page_table: Tensor, scaling: float) -> int:
    """Return the number of programs per KV head that fills the device of the query (B, Hq, D). Depends only on shapes."""
    (batch, max_pages), device = page_table.shape, query.device
    if device.type == "cpu":
        return choose_programs(batch, layout.kv_heads, max_pages, sm_count=INTERPRETED_PROGRAMS, resident=1)
    resident = decode_variant(make_setting(layout, query, scaling)).resident
    return choose_programs(batch, layout.kv_heads, max_pages, sm_count=sm_count(device), resident=resident)


def make_setting(layout: CacheLayout, new: Tensor, scaling: float = 1.0, rows: int = 1) -> Setting:
    """Return the setting of a launch for `new`: queries (B, Hq, D), or new keys. `rows`: as in Setting."""
    group = new.shape[-2] // layout.kv_heads
    dtype: Any = str(new.dtype).removeprefix("torch.")
    return Setting(layout, dtype, compute_capability(new.device), group, scaling, rows)


def plan_decode(layout: CacheLayout, lengths: Tensor, *, programs: int) -> DecodePlan:
    """Write the work list of a decode step on the device. `lengths`: (B) int32, tokens before the current one."""
    if programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    check({"lengths": lengths}, {"lengths": (INT32, ("B",))})
    batch = len(lengths)
    rows = work_rows(programs, batch, exact=layout.exact_tokens > 0)
    plan = DecodePlan(lengths.new_empty(rows, 5), lengths.new_empty(batch, 4))
    run(plan_work, (plan_grid(programs),), plan_variant(Setting(layout)), lengths, batch, programs, *plan)
    return plan


def decode_attention(layout: CacheLayout, query: Tensor, *inputs: Any, plan: DecodePlan, **options: Any) -> Tensor:
    """Return the attention output (B, Hq, D) of one decode step of one layer. Arguments as in decode_partials."""
    return reduce_partials(layout, *decode_partials(layout, query, *inputs, plan=plan, **options), query.dtype, plan)


def decode_partials(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    plan: DecodePlan,
    scaling: float,
    exact_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run decode_partial: the attention of every part of a decode step of one layer.

    Args:
        layout: Format of the cache.
        query: (B, Hq, D) float32, float16 or bfloat16.
        key_new: (B, H, D), keys of the current tokens.
        value_new: (B, H, D), values of the current tokens.
        cache: Tensors of layout.pools, layout.static_scales and layout.exact_buffers by name.
        page_table: (B, P) int32.
        lengths: (B) int32, tokens before the current one.
        plan: The result of plan_decode for the same lengths.
        scaling: Factor of the scores before the softmax.
        exact_slots: (B) int32, exact buffer of every sequence; required with exact tokens.

    Returns:
        partial_acc (R, Hq, D) of type partial_dtype, partial_ml (R, Hq, 2) float32, R = Y + B; rows without a part
        are not written.

    Raises:
        ValueError: A tensor does not fit the layout.
    """
    new = {"query": query, "key_new": key_new, "value_new": value_new}
    tables = {"page_table": page_table, "lengths": lengths, "exact_slots": exact_slots, **plan._asdict()}
    check_launch(layout, new | tables, cache)
    batch, rows = len(query), len(plan.work)
    variant = decode_variant(make_setting(layout, query, scaling))
    partials = allocate_partials(query, rows + batch, query.shape[1])
    run(
        decode_partial, (layout.kv_heads, rows), variant,
        *attention_inputs(layout, query, key_new, value_new, cache), page_table, lengths, *plan,
        *exact_inputs(layout, cache, exact_slots), page_table.shape[1], *partials,
    )  # fmt: skip
    return partials


def run(kernel: Any, grid: tuple[int, ...], variant: Variant, first: Tensor, *arguments: Any, **named: Any) -> None:
    """Launch a kernel on the device of its first tensor. By default Triton launches on the current device."""
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](first, *arguments, **named, **variant.constants, **variant.options)


def allocate_partials(query: Tensor, *rows: int) -> tuple[Tensor, Tensor]:
    """Return partial_acc (*rows, D) and partial_ml (*rows, 2), which a kernel fills."""
    kind: torch.dtype = getattr(torch, partial_dtype(str(query.dtype).removeprefix("torch.")))
    return query.new_empty((*rows, query.shape[-1]), dtype=kind), query.new_empty((*rows, 2), dtype=torch.float32)


def attention_inputs(
    layout: CacheLayout, query: Tensor, key_new: Tensor, value_new: Tensor, cache: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """Return the kernels' arguments from `query` to `value_block_scale`."""
    new = (query.contiguous(), key_new.contiguous(), value_new.contiguous())
    key, value = (cache.get(f"{side}_scale_pool", cache.get(f"{side}_scale")) for side in ("key", "value"))
    blocks = None
    if layout.value.layer_scale:
        value, blocks = cache["value_scale"], as_bytes(cache["value_scale_pool"])
    return *new, as_bytes(cache["key_pool"]), as_bytes(cache["value_pool"]), key, value, blocks


def exact_inputs(layout: CacheLayout, cache: Mapping[str, Tensor], exact_slots: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the kernels' `key_exact`, `value_exact` and `exact_slots`."""
    return (cache["key_exact"], cache["value_exact"], exact_slots) if layout.exact_tokens else (None, None, None)


def reduce_partials(
    layout: CacheLayout, partial_acc: Tensor, partial_ml: Tensor, dtype: torch.dtype, plan: DecodePlan | None = None
) -> Tensor:
    """Run reduce_parts: join the parts of decode_partials (with its `plan`) or of context_partials.

    Return the attention's output (B, Hq, D) or (X, Hq, D) in `dtype`.
    """
    *rows, q_heads, dim = partial_acc.shape
    sequences, splits, count = (None, rows[1], rows[0]) if plan is None else (plan.sequences, None, len(plan.sequences))
    out = partial_acc.new_empty((count, q_heads, dim), dtype=dtype)
    variant = reduce_variant(make_setting(layout, out))
    run(reduce_parts, (count * q_heads,), variant, partial_acc, partial_ml, sequences, splits, out)
    return out


def append(
    layout: CacheLayout,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    exact_slots: Tensor | None = None,
) -> None:
    """Quantize one new token of every row into the caches of L layers. Rows are sequences, or tokens of sequences.

    Token b is written at position lengths[b], for which the page table must have a page; a negative position is skipped. The
    lengths are not changed. No two rows may write to the same position of a page, nor to the same exact slot.

    Args:
        layout: Format of the cache.
        key_new: (L, B, H, D) float32, float16 or bfloat16.
        value_new: (L, B, H, D).
        cache: As in decode_attention, each tensor with a leading dimension L; written in place.
        page_table: (B, P) int32, or (B, 1) with only the page of that position.
        lengths: (B) int32, tokens before the new one.
        exact_slots: (B) int32, required with exact tokens: buffer m, or -1 - m for a token outside the ring of recent tokens.

    Raises:
        ValueError: A tensor does not fit the layout. Nothing is written.
    """
    tables = {"page_table": page_table, "lengths": lengths, "exact_slots": exact_slots}
    check_launch(layout, {"key_new": key_new, "value_new": value_new, **tables}, cache, layers=("L",))
    if page_table.shape[1] == 0:  # the kernel would read a page number in front of the table, and write to that page
        raise ValueError("page_table must have at least one column")
    layers, batch, heads, _ = key_new.shape
    exact = layout.exact_tokens > 0
    variant = append_variant(make_setting(layout, key_new))
    outputs = ("key_pool", "key_scale_pool", "value_pool", "value_scale_pool", "key_exact", "value_exact")
    run(
        append_kernel,
        (-(-heads // variant.constants["R"]), batch, layers),
        variant,
        key_new.contiguous(),
        value_new.contiguous(),
        page_table,
        lengths,
        exact_slots if exact else None,
        key_scale=cache.get("key_scale"),
        value_scale=cache.get("value_scale"),
        pages=cache["key_pool"].shape[1],
        table_width=page_table.shape[1],
        buffers=cache["key_exact"].shape[1] if exact else None,
        **{name: as_bytes(cache[name]) if name in cache else None for name in outputs},
    )


def as_bytes(pool: Tensor) -> Tensor:
    """Return float8 codes as uint8, which every target can load, and other pools unchanged."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def compute_capability(device: torch.device) -> int | None:
    """Return the device's compute capability, 90 for an H100; None for a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(blocks: int, kv_heads: int, max_pages: int, programs: int) -> int:
    """Return the number of splits over pages that fills the GPU: many for a few draft tokens, one for a long chunk.

    `blocks`: blocks of query rows of a KV head. `programs`: programs that the GPU runs at once.
    """
    return max(1, min(programs // (blocks * kv_heads), max_pages * PAGE_TOKENS // int(SPLIT_TOKENS)))


def context_attention(layout: CacheLayout, query: Tensor, *inputs: Any, **options: Any) -> Tensor:
    """Return the attention output (X, Hq, D) of new tokens in one layer. Arguments as in context_partials."""
    return reduce_partials(layout, *context_partials(layout, query, *inputs, **options), query.dtype)


def context_partials(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    splits: int | None = None,
    exact_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run context_partial: the attention of every split for the new tokens of all sequences, in one layer.

    Args:
        query, key_new, value_new: As in decode_partials, with X rows: X / B new tokens of one sequence after another.
        lengths: (B) int32, tokens before the new ones.
        splits: Splits over pages; None chooses them for this device.

    The other arguments are as in decode_partials.

    Returns:
        partial_acc (X, S, Hq, D) of type partial_dtype, partial_ml (X, S, Hq, 2) float32, S = context_splits(splits).

    Raises:
        ValueError: A tensor does not fit the layout.
    """
    new = {"query": query, "key_new": key_new, "value_new": value_new}
    tables = {"page_table": page_table, "lengths": lengths, "exact_slots": exact_slots}
    check_launch(layout, new | tables, cache, rows="X")
    (rows, q_heads, _), sequences = query.shape, len(lengths)
    check_counts(rows, sequences, splits)
    tokens = rows // sequences
    variant = context_variant(make_setting(layout, query, scaling, tokens * (q_heads // layout.kv_heads)))
    blocks = sequences * context_blocks(tokens, variant)
    if splits is None:
        interpreted = query.device.type == "cpu"
        programs = INTERPRETED_PROGRAMS if interpreted else sm_count(query.device) * variant.resident
        splits = choose_splits(blocks, layout.kv_heads, page_table.shape[1], programs)
    parts = context_splits(splits)
    partials = allocate_partials(query, rows, parts, q_heads)
    run(
        context_partial, (blocks, layout.kv_heads, parts), variant,
        *attention_inputs(layout, query, key_new, value_new, cache), page_table, lengths,
        *exact_inputs(layout, cache, exact_slots), page_table.shape[1], tokens, *partials,
    )  # fmt: skip
    return partials
