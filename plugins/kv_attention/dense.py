"""Attention of long chunks over the dequantized history. Experimental: no engine chooses it before a GPU has timed it.

Shapes as in launch.py.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from plugins.kv_attention.kernels.gather import gather
from plugins.kv_attention.kernels.variants import gather_variant
from plugins.kv_attention.launch import attended_tensors, check_context, run, setting_of
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout

DENSE_TOKENS = 128
"""Fewest new tokens per sequence for dense_attention: they share the cost of dequantizing the history."""

DENSE_ROWS = 4096
"""Fewest query rows (new tokens times query heads) for dense_attention. FlashAttention computes 128 rows per program and does
not split the history, so fewer rows leave most of the GPU idle."""

DENSE_BYTES = 1 << 30
"""Largest memory for the keys and values of dense_attention."""


def prefers_dense(layout: CacheLayout, query: Tensor, page_table: Tensor) -> bool:
    """Return whether dense_attention should be faster than the kernels over the pages, judged by shapes alone.

    float32 queries are left to the kernels, because FlashAttention computes in 16 bits; so are caches with exact tokens,
    because their positions lie in the pages too.
    """
    if layout.exact_tokens or query.dtype == torch.float32 or not query.is_floating_point():
        return False
    if query.device.type != "cpu" and not torch.backends.cuda.is_flash_attention_available():
        return False
    sequences, rows = len(page_table), page_table.numel() * PAGE_TOKENS + len(query)
    return (
        len(query) >= DENSE_TOKENS * sequences
        and query.numel() >= DENSE_ROWS * layout.head_dim
        and 2 * rows * layout.kv_heads * layout.head_dim * query.itemsize <= DENSE_BYTES
    )


def dense_attention(
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
    exact_slots: Tensor | None = None,
) -> Tensor:
    """Dequantize the history into float16 and run torch's FlashAttention over it and the new tokens, in float16.

    Takes the arguments of context_partials, but neither float32 queries nor a layout with exact tokens. Each number of the
    history is rounded once, to 11 bits. A bfloat16 query beyond 65504 overflows. The host reads no lengths, so a CUDA graph can
    capture the launches.

    Returns:
        (X, Hq, D) in the query's type.

    Raises:
        ValueError: A tensor does not fit the layout, or the layout or the query's type is not served.
    """
    check_context(layout, query, key_new, value_new, cache, page_table, lengths, query_starts, exact_slots)
    if layout.exact_tokens:
        raise ValueError(f"layout must keep no exact tokens, got {layout.exact_tokens}: dense_attention does not read them")
    if query.dtype == torch.float32:
        raise ValueError("query must not be float32: dense_attention computes in float16")
    (tokens, _, dim), sequences, columns = query.shape, len(lengths), page_table.shape[1]
    # Upper bound of a sequence's new tokens, which the host does not read from `query_starts`.
    most = tokens // sequences if query_starts is None else tokens
    starts = query_starts
    if starts is None:
        starts = torch.arange(0, tokens + 1, most, dtype=torch.int32, device=query.device)
    half = query.contiguous().half()
    rows = page_table.numel() * PAGE_TOKENS + tokens
    keys, values = (half.new_empty(rows, layout.kv_heads, dim) for _ in range(2))
    key_starts = lengths.new_empty(sequences + 1)
    variant = gather_variant(setting_of(layout, query, scaling))
    run(
        gather, (columns + -(-most // PAGE_TOKENS), layout.kv_heads, sequences), variant,
        *attended_tensors(layout, query, key_new, value_new, cache)[1:], starts, page_table, lengths, columns,
        keys, values, key_starts,
    )  # fmt: skip
    if query.device.type == "cpu":
        out = _attend_each(half, keys, values, starts, key_starts, scaling)
    else:
        # Call FlashAttention as torch.nn.attention.varlen does: causal from the lower right, grouped query heads, ragged
        # sequences.
        out = torch.ops.aten._flash_attention_forward(
            half, keys, values, starts, key_starts, most, columns * PAGE_TOKENS + most, 0.0, True, False, scale=scaling
        )[0]
    return out.to(query.dtype)


def _attend_each(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, scaling: float) -> Tensor:
    """Attend sequence by sequence, on a CPU, where torch has no FlashAttention for ragged sequences."""
    out = torch.empty_like(query)
    for (first, last), (low, high) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        rows, key, value = (x.transpose(0, 1)[None] for x in (query[first:last], keys[low:high], values[low:high]))
        bias = causal_lower_right(last - first, high - low)
        attended = scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
        out[first:last] = attended[0].transpose(0, 1)
    return out
