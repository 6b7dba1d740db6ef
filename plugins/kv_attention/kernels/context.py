"""Attention of several new tokens per sequence over the quantized pages, for prompt chunks and for drafts to verify.

Shapes: B sequences, X new tokens of all sequences, H KV heads, G query heads per KV head, Hq = H * G, D head_dim, T tokens of
a cache tile, U tokens of a tile of new tokens, S splits, E exact slots. Every sequence has X / B new tokens. The query rows of
a sequence and KV head are its new tokens' G heads, token by token; N rows are the columns of one program.

Every new token attends to all cached tokens and to the unquantized new tokens up to itself. One program attends to the pages of
one (block of N query rows, KV head, split); programs of the first split attend to the new tokens, the sinks and the recent
tokens. reduce_parts joins the splits.

Tiles and operand order are those of plugins/kv_attention/kernels/decode.py: scores (T, N) = keys (T, D) x query^T
and sums (D, N) += values^T (D, T) x p (T, N). The codes are decoded to the matrix instruction's first operand in registers, so
only p passes through shared memory, and N columns share the cost of decoding a tile.
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.attend import (
    HEADROOM,
    LOG2_E,
    MIN_SCALE_BITS,
    accumulate_values,
    attend_exact,
    attend_pages,
    query_parts,
    scale_queries,
    static_scale,
    store_partials,
)
from plugins.kv_attention.kernels.codes import streams_of

INITIAL_MAX = tl.constexpr(-3e38)
"""Finite initial maximum, below all scores."""
SPLIT_TOKENS = tl.constexpr(512)
"""Minimum tokens per split. Writing and reading a split's means for 64 columns is as much traffic as about 170 tokens."""


@triton.jit
def _split_tiles(length, split, splits, T: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Return the first tile of a split over the pages, and the tile after its last. Both are equal if the split is empty."""
    FIRST: tl.constexpr = SINK // T
    end = length - RECENT
    tiles = tl.where(end > SINK, tl.cdiv(end, T) - FIRST, 0)
    per_split = tl.maximum(tl.cdiv(tiles, splits), SPLIT_TOKENS // T)
    low = FIRST + tl.minimum(split * per_split, tiles)
    high = FIRST + tl.minimum((split + 1) * per_split, tiles)
    return low, high


@triton.jit
def _scaled_queries(query, row, rows, N: tl.constexpr, D: tl.constexpr, SCALING: tl.constexpr):
    """Return a block's queries (D, N) and factors as scale_queries does. Rows that are not in `rows` (N) are zeros."""
    pointers = query + row[None, :] * D + tl.arange(0, D)[:, None]
    columns = tl.load(pointers, mask=tl.broadcast_to(rows[None, :], (D, N)), other=0.0)
    return scale_queries(columns, SCALING)


@triton.jit
def _store_empty_split(partial_ml, partial_row, rows, N: tl.constexpr):
    """Store -inf and 0. Because m is -inf, reduce_parts does not read the split's means."""
    tl.store(partial_ml + partial_row * 2, tl.full((N,), float("-inf"), tl.float32), mask=rows)
    tl.store(partial_ml + partial_row * 2 + 1, tl.zeros((N,), tl.float32), mask=rows)


@triton.jit
def _accumulate_new_values(values, p, sums, PTX: tl.constexpr, NEW: tl.constexpr):
    """Return sums (D, N) + values^T (D, U) x p (U, N) of new tokens."""
    if NEW == "fp32":
        sums = tl.dot(tl.trans(values), p, sums, input_precision="bf16x3" if PTX else "ieee")
    else:
        sums = accumulate_values(values, p, sums, PTX, NEW)
    return sums


@triton.jit
def _new_split(
    query, key_new, value_new, key_exact, value_exact, exact_slots, b, start, h, length, last, token, row, partial_row,
    rows, scaled, per_column, partial_acc, partial_ml,
    H: tl.constexpr, U: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALING: tl.constexpr, PARTS: tl.constexpr,
    NEW: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend to the exact tokens, and to the new tokens up to the query's own; `last` is the block's last new token."""
    if SINK + RECENT > 0:
        buffer = (tl.load(exact_slots + b).to(tl.int64) * H + h) * ((SINK + RECENT) * D)
        key_exact += buffer
        value_exact += buffer
    d = tl.arange(0, D)
    WIDEN: tl.constexpr = NEW == "bf16" and not PTX  # the interpreter has no bfloat16 arithmetic
    # float32 queries and keys are multiplied in slices of 64 channels, to save registers.
    STEP: tl.constexpr = 64 if NEW == "fp32" else D
    c = tl.arange(0, STEP)
    m = tl.full((N,), INITIAL_MAX, tl.float32)  # finite, because there may be no exact token that is visible
    l = tl.zeros((N,), tl.float32)
    sums = (tl.zeros((D, N), tl.float32),)
    if SINK + RECENT > 0:
        m, l, sums = attend_exact(
            key_exact, value_exact, None, length, scaled, per_column, m, l, sums, D, PARTS, SINK, RECENT, PTX, FP8
        )
    accumulated = sums[0]
    for first in tl.range(0, last + 1, U, num_stages=1):
        u = first + tl.arange(0, U)
        inside = (u <= last)[:, None]
        offset = ((start + u) * H + h)[:, None] * D
        scores = tl.zeros((U, N), tl.float32)
        for low in tl.static_range(0, D, STEP):
            keys = tl.load(key_new + offset + low + c[None, :], mask=tl.broadcast_to(inside, (U, STEP)), other=0.0)
            columns = query + row[None, :] * D + low + c[:, None]
            queries = tl.load(columns, mask=tl.broadcast_to(rows[None, :], (STEP, N)), other=0.0)
            if WIDEN:
                keys = keys.to(tl.float32)
                queries = queries.to(tl.float32)
            scores = tl.dot(keys, queries, scores, input_precision="bf16x3" if PTX else "ieee")
        values = tl.load(value_new + offset + d[None, :], mask=tl.broadcast_to(inside, (U, D)), other=0.0)
        if WIDEN:
            values = values.to(tl.float32)
        scores = tl.where((u[:, None] <= token[None, :]) & inside, scores * (SCALING * LOG2_E), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 0) - HEADROOM)
        p = tl.math.exp2(scores - m_new[None, :])
        decay = tl.math.exp2(m - m_new)
        l = l * decay + tl.sum(p, 0)
        accumulated = _accumulate_new_values(values, p, accumulated * decay[None, :], PTX, NEW)
        m = m_new
    store_partials(partial_acc, partial_ml, partial_row, rows, m, l, 1.0, (accumulated,), N, D, "fp16", 1)


@triton.jit
def _page_split(
    key_pool, value_pool, key_scale, value_scale, value_block_scale, table, low, high, end, h, partial_row, rows, scaled,
    per_column, partial_acc, partial_ml,
    H: tl.constexpr, T: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the positions in [SINK, end) of tiles [low, high), from the pages. The split is never empty."""
    queries = query_parts(scaled, PARTS, KEY, PTX)
    unit = tl.full((), MIN_SCALE_BITS, tl.int32)
    per_column *= static_scale(key_scale, h, KEY_SCALE)
    factor = static_scale(value_scale, h, VALUE_SCALE)
    if VALUE_SCALE == "block":
        value_scale = value_block_scale
    STREAMS: tl.constexpr = streams_of(VALUE)
    C: tl.constexpr = D // STREAMS // CHUNKS
    m = tl.full((N,), float("-inf"), tl.float32)
    l = tl.zeros((N,), tl.float32)
    sums = ()
    for _ in tl.static_range(CHUNKS * STREAMS):
        sums = sums + (tl.zeros((C, N), tl.float32),)

    m, l, unit, sums = attend_pages(
        key_pool, value_pool, key_scale, value_scale, table, low, high, end, h, queries, per_column, m, l, unit, sums,
        H, T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, SINK, PTX, FP8, STAGES,
    )  # fmt: skip
    if VALUE_SCALE == "group":
        factor = unit.to(tl.float32, bitcast=True)
    store_partials(partial_acc, partial_ml, partial_row, rows, m, l, factor, sums, N, D, VALUE, CHUNKS)


@triton.jit(do_not_specialize=["table_width", "tokens"])
def context_partial(
    query, key_new, value_new, key_pool, value_pool, key_scale, value_scale, value_block_scale, page_table, lengths,
    key_exact, value_exact, exact_slots, table_width, tokens, partial_acc, partial_ml,
    H: tl.constexpr, G: tl.constexpr, T: tl.constexpr, U: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    SCALING: tl.constexpr, PARTS: tl.constexpr, NEW: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens of one (block of query rows, KV head, split). Grid (B * ceil(tokens * G / N), H, S).

    The first split attends to the new and the exact tokens, the others to the pages. Tensors that the layout lacks are None.
    Every sequence has `tokens` new tokens.

    Args:
        query: (X, Hq, D).
        key_new, value_new: (X, H, D), of the query's type.
        key_pool, value_pool, key_scale, value_scale, value_block_scale: As in decode_partial.
        page_table: (B, table_width) int32.
        lengths: (B) int32, tokens before the new ones.
        key_exact, value_exact: (buffers, H, E, D) float16, without the new tokens.
        exact_slots: (B) int32, exact buffer of every sequence.
        partial_acc: Output (X, S, Hq, D) float16 or float32, weighted means of the values; an empty split writes none.
        partial_ml: Output (X, S, Hq, 2) float32, m and l; -inf and 0 for an empty split.
        NEW: Type of the new tokens: "fp16", "bf16" or "fp32".
    """
    h = tl.program_id(1)
    split = tl.program_id(2) - 1  # over the pages; -1 is the split of the new tokens
    splits = tl.num_programs(2) - 1
    blocks = tl.cdiv(tokens * G, N)
    b = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start = b.to(tl.int64) * tokens
    n = block * N + tl.arange(0, N)
    rows = n < tokens * G
    token = n // G
    row = (start + token) * (H * G) + h * G + n % G
    partial_row = ((start + token) * (splits + 1) + split + 1) * (H * G) + h * G + n % G
    length = tl.load(lengths + b)
    low, high = _split_tiles(length, split, splits, T, SINK, RECENT)
    if (low == high) & (split >= 0):
        _store_empty_split(partial_ml, partial_row, rows, N)
        return

    scaled, per_column = _scaled_queries(query, row, rows, N, D, SCALING)
    if split < 0:
        last = tl.minimum((block * N + N - 1) // G, tokens - 1)
        _new_split(
            query, key_new, value_new, key_exact, value_exact, exact_slots, b, start, h, length, last, token, row,
            partial_row, rows, scaled, per_column, partial_acc, partial_ml,
            H, U, N, D, SCALING, PARTS, NEW, SINK, RECENT, PTX, FP8,
        )  # fmt: skip
    else:
        table = page_table + b.to(tl.int64) * table_width
        _page_split(
            key_pool, value_pool, key_scale, value_scale, value_block_scale, table, low, high, length - RECENT, h,
            partial_row, rows, scaled, per_column, partial_acc, partial_ml,
            H, T, N, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, SINK, PTX, FP8, STAGES,
        )  # fmt: skip
