"""The attention of several new tokens of each sequence as a torch operator, `kvgate::context_attention`.

A cache is passed as its tensors, as in plugins/kv_attention/ops.py, and launches depend on shapes alone here, too. One operator
serves a chunk of a prompt, the rest of a prompt whose prefix is cached, and drafted tokens that are verified together.

Shapes: B sequences, X new tokens of all of them, Hq query heads, H KV heads, D head_dim, N pages, P columns of the page table,
W elements and g scales of a token, M exact buffers, E exact tokens.

Example:
    out = context_attention(query, key_new, value_new, page_table, lengths, starts, **cache, scaling=head_dim**-0.5)
"""

import torch
from torch import Tensor

from plugins.kv_attention import context
from plugins.kv_attention.ops import DEVICES, _cache, layout_of


@torch.library.custom_op("kvgate::context_attention", mutates_args=(), device_types=DEVICES)
def context_attention(
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_scale_pool: Tensor | None = None,
    value_scale_pool: Tensor | None = None,
    key_exact: Tensor | None = None,
    value_exact: Tensor | None = None,
    exact_slots: Tensor | None = None,
    sink_tokens: int = 0,
    scaling: float = 1.0,
    splits: int | None = None,
) -> Tensor:
    """Run the attention of several new tokens of each sequence in one layer, before any of them is appended.

    A new token attends to what one at position lengths[b] reads of the cache, and to the new tokens up to itself, unquantized.

    Args:
        query: (X, Hq, D) float32, float16 or bfloat16, the new tokens of one sequence after another.
        key_new: (X, H, D), keys of the new tokens, of the query's type.
        value_new: (X, H, D), values of the new tokens, of the query's type.
        page_table: (B, P) int32. Entries beyond a sequence's length are not read.
        lengths: (B) int32, tokens before the new ones.
        query_starts: (B + 1) int32, ascending from 0: the first new token of each sequence, and X. A sequence may have none.
            None: every sequence has X / B.
        key_pool: (N, H, 64, W).
        value_pool: (N, H, 64, W).
        key_scale: (1) or (H) float32, of static keys.
        value_scale: (1) or (H) float32, of static values and of nvfp4's.
        key_scale_pool: (N, H, 64, 1) float16, of dynamic keys.
        value_scale_pool: (N, H, 64, g) float16, of dynamic values; float8_e4m3fn, of nvfp4's.
        key_exact: (M, H, E, D) float16, with exact tokens: the sinks, then the recent tokens.
        value_exact: (M, H, E, D) float16, with exact tokens.
        exact_slots: (B) int32, with exact tokens: the exact buffer of each sequence.
        sink_tokens: How many of the E exact tokens are sinks.
        scaling: Factor of the scores before the softmax.
        splits: Splits over pages, which run side by side; None chooses them for this device.

    Returns:
        (X, Hq, D) in the type of query.

    Raises:
        ValueError: The tensors do not form a cache, or its new tokens.
    """
    cache = _cache(
        key_pool=key_pool, value_pool=value_pool, key_scale=key_scale, value_scale=value_scale,
        key_scale_pool=key_scale_pool, value_scale_pool=value_scale_pool, key_exact=key_exact, value_exact=value_exact,
    )  # fmt: skip
    layout = layout_of(query.shape[-1], cache, sink_tokens)
    return context.context_attention(
        layout,
        query,
        key_new,
        value_new,
        cache,
        page_table,
        lengths,
        query_starts=query_starts,
        scaling=scaling,
        splits=splits,
        exact_slots=exact_slots,
    )


@context_attention.register_fake
def _(query: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
