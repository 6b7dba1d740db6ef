"""Launches of the attention of several new tokens of each sequence: context_partial, then context_reduce.

As in launch.py, launches and checks depend on shapes, types, strides and addresses only, so that a CUDA graph can capture
them.

Shapes: B sequences, X new tokens of all of them, H KV heads, Hq query heads, D head_dim, P columns of the page table, S splits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plugins.kv_attention.checks import check_attended, check_cache, check_index, check_tables
from plugins.kv_attention.kernels.context import SPLIT_TOKENS, context_partial, context_reduce
from plugins.kv_attention.kernels.context_variants import context_blocks, context_splits, context_variant, join_variant
from plugins.kv_attention.launch import (
    INTERPRETED_PROGRAMS,
    attended_tensors,
    empty_partials,
    exact_tensors,
    run,
    setting_of,
    sm_count,
)
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout


def choose_splits(blocks: int, kv_heads: int, max_pages: int, programs: int) -> int:
    """Return the number of splits over pages that fills the GPU: many of a few drafted tokens, one of a long chunk.

    `blocks`: blocks of query rows of a KV head. `programs`: those that the GPU runs at once.
    """
    return max(1, min(programs // (blocks * kv_heads), max_pages * PAGE_TOKENS // int(SPLIT_TOKENS)))


def context_attention(layout: CacheLayout, query: Tensor, *inputs: Any, **options: Any) -> Tensor:
    """Run the attention of new tokens in one layer, (X, Hq, D) in the query's type. Takes what context_partials takes."""
    return join_partials(layout, *context_partials(layout, query, *inputs, **options), query.dtype)


def context_partials(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    query_starts: Tensor | None = None,
    scaling: float,
    splits: int | None = None,
    exact_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run context_partial: the attention of every split of several new tokens of each sequence, in one layer.

    Args:
        layout: Format of the cache.
        query: (X, Hq, D) float32, float16 or bfloat16, the new tokens of one sequence after another.
        key_new: (X, H, D), keys of the new tokens, of the query's type.
        value_new: (X, H, D), values of the new tokens, of the query's type.
        cache: As in launch.decode_partials.
        page_table: (B, P) int32.
        lengths: (B) int32, tokens before the new ones.
        query_starts: (B + 1) int32, ascending from 0: the first new token of each sequence, and X. None: each has X / B.
        scaling: Factor of the scores before the softmax.
        splits: Splits over pages; None chooses them for this device.
        exact_slots: (B) int32, exact buffer of each sequence; required with exact tokens.

    Returns:
        partial_acc (X, Hq, S, D) in partial_type(query.dtype), partial_ml (X, Hq, S, 2) float32, S = context_splits(splits).

    Raises:
        ValueError: A tensor does not fit the layout.
    """
    check_attended(layout, query, key_new, value_new, "X")
    tokens, q_heads = query.shape[:2]
    for name, tensor in (("key_new", key_new), ("value_new", value_new)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype}, as query is, got {tensor.dtype}")
    sequences = len(lengths)
    if query_starts is None and (not sequences or tokens % sequences):
        raise ValueError(f"query_starts must be given: {tokens} tokens are not as many for each of {sequences} sequences")
    if splits is not None and splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    check_cache(layout, cache, (), query.device)
    check_tables(layout, sequences, page_table, lengths, exact_slots, query.device)
    if query_starts is not None:
        check_index("query_starts", query_starts, (sequences + 1,), query.device)
    rows = -(-tokens * (q_heads // layout.kv_heads) // sequences)
    variant = context_variant(setting_of(layout, query, scaling, rows))
    blocks = context_blocks(tokens, sequences, variant, ragged=query_starts is not None)
    if splits is None:
        interpreted = query.device.type == "cpu"
        programs = INTERPRETED_PROGRAMS if interpreted else sm_count(query.device) * variant.resident
        splits = choose_splits(blocks, layout.kv_heads, page_table.shape[1], programs)
    parts = context_splits(splits)
    partials = empty_partials(query, tokens, q_heads, parts)
    counts = (tokens // sequences, None) if query_starts is None else (None, sequences)
    run(
        context_partial, (blocks, layout.kv_heads, parts), variant,
        *attended_tensors(layout, query, key_new, value_new, cache), query_starts, page_table, lengths,
        *exact_tensors(layout, cache, exact_slots), page_table.shape[1], *counts, *partials,
    )  # fmt: skip
    return partials


def join_partials(layout: CacheLayout, partial_acc: Tensor, partial_ml: Tensor, dtype: torch.dtype) -> Tensor:
    """Run context_reduce: join the splits of context_partials to the attention's output (X, Hq, D) in `dtype`."""
    tokens, q_heads, parts, dim = partial_acc.shape
    out = partial_acc.new_empty((tokens, q_heads, dim), dtype=dtype)
    variant = join_variant(replace(setting_of(layout, out), splits=parts - 1))
    run(context_reduce, (tokens * q_heads,), variant, partial_acc, partial_ml, parts, out)
    return out
