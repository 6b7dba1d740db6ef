"""Plain functions that run the kernels on torch tensors: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

Shapes: L layers, B sequences, H KV heads, Hq query heads, D head_dim, P pages a sequence, S splits, E exact slots.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.kv_attention.kernels.append import append as append_kernel
from plugins.kv_attention.kernels.decode import decode_partial
from plugins.kv_attention.kernels.reduce import decode_reduce
from plugins.kv_attention.kernels.variants import Variant, append_variant, decode_variant, partial_splits, reduce_variant
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout

MIN_SPLIT_TOKENS = 512
"""A split shorter than this costs more in the reduce than it gains."""


def choose_splits(batch: int, kv_heads: int, max_pages: int, sm_count: int, resident: int) -> int:
    """Splits of the pages so that every SM has `resident` programs, none shorter than MIN_SPLIT_TOKENS.

    max_pages: page table columns, P. The result depends on shapes only, so that a CUDA graph can hold it.
    """
    wanted = -(-sm_count * resident // (batch * kv_heads))
    return max(1, min(wanted, max_pages * PAGE_TOKENS // MIN_SPLIT_TOKENS))


def decode_attention(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    splits: int,
    exact_slots: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """One decode step of one layer: query (B, Hq, D), key_new and value_new (B, H, D) -> (B, Hq, D) in query's type.

    cache: the tensors of layout.pools, static_scales and exact_buffers by name. page_table (B, P), lengths (B) and
    exact_slots (B) int32; lengths count the tokens before the current one. Softmax of scores times `scaling`.
    variant: of decode_partial, for who tunes it.
    """
    partial_acc, partial_ml = decode_partials(
        layout,
        query,
        key_new,
        value_new,
        cache,
        page_table,
        lengths,
        scaling=scaling,
        splits=splits,
        exact_slots=exact_slots,
        variant=variant,
    )
    return reduce_partials(layout, partial_acc, partial_ml, query.dtype)


def decode_partials(
    layout: CacheLayout,
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    cache: Mapping[str, Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    splits: int,
    exact_slots: Tensor | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """The first kernel: partial_acc (B, Hq, S, D) and partial_ml (B, Hq, S, 2) float32, S = partial_splits(layout, splits)."""
    batch, q_heads, dim = query.shape
    if dim != layout.head_dim or q_heads % layout.kv_heads:
        raise ValueError(f"query must be (B, G * {layout.kv_heads}, {layout.head_dim}), got {tuple(query.shape)}")
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    if variant is None:
        variant = decode_variant(
            layout,
            group=q_heads // layout.kv_heads,
            query_dtype=str(query.dtype).removeprefix("torch."),
            scaling=scaling,
            sm=compute_capability(query.device),
        )
    parts = partial_splits(layout, splits)
    partial_acc = query.new_empty((batch, q_heads, parts, dim), dtype=torch.float32)
    partial_ml = query.new_empty((batch, q_heads, parts, 2), dtype=torch.float32)
    exact = layout.exact_tokens > 0
    if exact and exact_slots is None:
        raise ValueError(f"exact_slots must be given: the layout keeps {layout.exact_tokens} exact tokens")
    arguments = (
        query.contiguous(),
        key_new.contiguous(),
        value_new.contiguous(),
        *(as_bytes(cache[name]) for name in ("key_pool", "value_pool")),
        *(cache.get(f"{side}_scale_pool", cache.get(f"{side}_scale")) for side in ("key", "value")),
        page_table,
        lengths,
        *((cache["key_exact"], cache["value_exact"], exact_slots) if exact else (None, None, None)),
    )
    decode_partial[(parts, layout.kv_heads, batch)](
        *arguments,
        page_table.shape[1],
        partial_acc,
        partial_ml,
        **variant.constants,
        **variant.options,
    )
    return partial_acc, partial_ml


def reduce_partials(layout: CacheLayout, partial_acc: Tensor, partial_ml: Tensor, dtype: torch.dtype) -> Tensor:
    """The second kernel: partials -> (B, Hq, D) in `dtype`."""
    batch, q_heads, parts, dim = partial_acc.shape
    sm = compute_capability(partial_acc.device)
    variant = reduce_variant(layout, splits=parts, out_dtype=str(dtype).removeprefix("torch."), sm=sm)
    out = partial_acc.new_empty((batch, q_heads, dim), dtype=dtype)
    decode_reduce[(batch * q_heads,)](partial_acc, partial_ml, parts, out, **variant.constants, **variant.options)
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
    """Quantize one new token of every sequence, key_new and value_new (L, B, H, D), into the caches of L layers.

    cache: as in decode_attention, each tensor with a leading L. Token b is written at position lengths[b], which the table
    must reach; lengths stay as they are. No two sequences write to the same page and row.
    """
    layers, batch, heads, dim = key_new.shape
    if (heads, dim) != (layout.kv_heads, layout.head_dim):
        raise ValueError(f"key_new must be (L, B, {layout.kv_heads}, {layout.head_dim}), got {tuple(key_new.shape)}")
    exact = layout.exact_tokens > 0
    if exact and exact_slots is None:
        raise ValueError(f"exact_slots must be given: the layout keeps {layout.exact_tokens} exact tokens")
    variant = append_variant(layout, sm=compute_capability(key_new.device))
    written = ("key_pool", "key_scale_pool", "value_pool", "value_scale_pool", "key_exact", "value_exact")
    append_kernel[(-(-heads // variant.constants["R"]), batch, layers)](
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
        **dict.fromkeys((f"{name}_in" for name in written), None),
        **{name: as_bytes(cache[name]) if name in cache else None for name in written},
        **variant.constants,
        **variant.options,
    )


def as_bytes(pool: Tensor) -> Tensor:
    """Float8 codes as uint8, which every target can load; anything else as it is."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def compute_capability(device: torch.device) -> int | None:
    """90 for an H100; None for a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
