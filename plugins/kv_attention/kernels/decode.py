"""Split-K attention of a decode step: a work list, and the attention of its parts, which reduce_parts joins.

Shapes: B sequences, H KV heads, G query heads per KV head, Hq = H * G, D head_dim, N = max(8, G rounded up to a power of two)
columns, T tokens of a tile (a page of 64, or half or a quarter of it), W stored elements of a value row, C channels of a
row's chunk, E exact slots, K programs of a KV head for the pages, Y all its programs (K, or K + B with exact tokens), R
parts (a part is the result of one program for one sequence).

The work list is made on the GPU from the real lengths. The pages of all sequences, laid end to end, are cut into shares of
equal length, one per program. A share may start and end within a sequence. Every sequence counts at least one
page, so that a sequence without pages also has a result. Parts are numbered along the pages: no two parts share a number, and
the parts of a sequence have successive numbers. Program p's part of sequence b has the number p + b. With exact tokens, each
sequence begins with one more part, for these tokens, and the number is p + 2 b + 1.

One program attends with one KV head to its share of all sequences' pages, sequence by sequence. Operands are swapped: scores
(T, N) = keys (T, D) x query^T (D, N) and sums (D, N) += values^T (D, T) x p (T, N), so that the query group is the matrix
instruction's dimension N, whose size is 8: with G = 8, no padding is computed.

Scores are in log2 units. The weights p are 2^(score - m) with m = maximum - 15, so that float16 holds them with full
precision down to 2^-29 of the largest weight. A value scale is folded into p. To keep tiny and huge scales within float16's
range, the scale is first divided by a unit: the largest scale of this part so far, rounded up to a power of two. For nvfp4 the
product of a code and its block's scale is a float16 without rounding, and the layer's scale is one factor of the sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from plugins.kv_attention.kernels.attend import (
    HEADROOM,
    MIN_SCALE_BITS,
    P_MAX,
    attend_exact,
    attend_pages,
    query_parts,
    scale_queries,
    static_scale,
    store_partials,
)
from plugins.kv_attention.kernels.codes import streams_of
from plugins.kv_attention.kernels.tiles import channel_order

PAGE = tl.constexpr(64)


@triton.jit
def _pages(lengths, b, batch, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Return the number of pages that hold positions SINK to length - RECENT, for each sequence in b.

    The number is at least 1; it is 0 for a `b` beyond the batch.
    """
    end = tl.load(lengths + b, mask=b < batch, other=0) - RECENT
    pages = tl.where(end > SINK, tl.cdiv(end, PAGE) - SINK // PAGE, 1)
    return tl.where(b < batch, pages, 0)


@triton.jit(do_not_specialize=["batch", "programs"])
def plan_work(
    lengths, batch, programs, work, sequences,
    SINK: tl.constexpr, RECENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the work list. Grid (ceil(K / ROWS)).

    Args:
        lengths: (B) int32, tokens before the current one.
        batch: B.
        programs: K.
        work: Output (Y, 5) int32, a row per program: its sequences [first, end), its pages [first, end), and the number of its
            first part. A program without work has end < first. With exact tokens, the first B rows are for the sequences' exact
            tokens: end = first, and pages [0, 0).
        sequences: Output (B, 4) int32: pages [first, end), the number of the first part, and the number of parts.
        ROWS: Programs of decode_partial that one program of this kernel plans.
        BLOCK: Sequences that are read at once.
    """
    EXACT: tl.constexpr = 1 if SINK + RECENT > 0 else 0
    total = 0
    for first in tl.range(0, batch, BLOCK):
        total += tl.sum(_pages(lengths, first + tl.arange(0, BLOCK), batch, SINK, RECENT), 0)
    # A share has at least two pages, because its part is also written and read: with up to 8 query heads per KV head, this is
    # less than a fifth of the traffic of two pages, but a third of the traffic of one.
    share = tl.maximum(tl.cdiv(total, programs), 2)

    program = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = program * share
    high = tl.minimum(low + share, total)
    begin = tl.zeros((ROWS,), tl.int32)
    last = tl.zeros((ROWS,), tl.int32)
    before = 0
    for first in tl.range(0, batch, BLOCK):
        b = first + tl.arange(0, BLOCK)
        exists = b < batch
        pages = _pages(lengths, b, batch, SINK, RECENT)
        ends = before + tl.cumsum(pages, 0)
        begin += tl.sum(((ends[None, :] <= low[:, None]) & exists[None, :]).to(tl.int32), 1)
        last += tl.sum(((ends[None, :] < high[:, None]) & exists[None, :]).to(tl.int32), 1)
        if tl.program_id(0) == 0:
            first_part = (ends - pages) // share + (1 + EXACT) * b
            tl.store(sequences + b * 4, ends - pages, mask=exists)
            tl.store(sequences + b * 4 + 1, ends, mask=exists)
            tl.store(sequences + b * 4 + 2, first_part, mask=exists)
            tl.store(sequences + b * 4 + 3, (ends - 1) // share - (ends - pages) // share + 1 + EXACT, mask=exists)
            if EXACT:
                tl.store(work + b * 5, b, mask=exists)
                tl.store(work + b * 5 + 1, b, mask=exists)
                tl.store(work + b * 5 + 2, 0, mask=exists)
                tl.store(work + b * 5 + 3, 0, mask=exists)
                tl.store(work + b * 5 + 4, first_part, mask=exists)
        before += tl.sum(pages, 0)
    row = work + (program + EXACT * batch) * 5
    exists = program < programs
    tl.store(row, begin, mask=exists)
    tl.store(row + 1, tl.where(low < total, last + 1, begin - 1), mask=exists)
    tl.store(row + 2, low, mask=exists)
    tl.store(row + 3, high, mask=exists)
    tl.store(row + 4, program + (1 + EXACT) * begin + EXACT, mask=exists)


@triton.jit
def _initial_sums(seeded, score, value_new, unit, N: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the initial m, l and sums (in multiples of `unit`): of the current token if `seeded`, otherwise of no token."""
    STREAMS: tl.constexpr = streams_of(VALUE)
    C: tl.constexpr = D // STREAMS // CHUNKS
    m = tl.where(seeded, score - HEADROOM, float("-inf"))
    l = tl.where(seeded, P_MAX, 0.0) + tl.zeros((N,), tl.float32)
    sums = ()
    for c in tl.static_range(CHUNKS):
        for s in tl.static_range(STREAMS):
            value = tl.load(value_new + s * (D // STREAMS) + c * C + channel_order(VALUE, C)).to(tl.float32)
            value = tl.where(seeded, value * (P_MAX / unit), 0.0)
            sums = sums + (value[:, None] + tl.zeros((C, N), tl.float32),)
    return m, l, sums


@triton.jit
def _store_part(
    partial_acc, partial_ml, number, h, m, l, unit, sums,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store one KV head's results of part `number`. Load `number` just before the call, because its rows occupy registers."""
    n = tl.arange(0, N)
    row = (number.to(tl.int64) * H + h) * G + n
    store_partials(partial_acc, partial_ml, row, n < G, m, l, unit, sums, N, D, VALUE, CHUNKS)


@triton.jit
def _exact_part(
    query, key_new, value_new, key_exact, value_exact, exact_slots, lengths, h, work, partial_acc, partial_ml,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALING: tl.constexpr, PARTS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend to the current token, the sinks and the recent tokens of one sequence, all unquantized.

    work: The program's row of the work list. attend_exact needs a pointer to 0: `work + 2`, the row's first page,
        which is 0 for exact tokens.
    """
    b = tl.load(work)
    head = b * H + h
    scaled, per_column, score_new = _scaled_query(query, key_new, head, G, N, D, SCALING)
    buffer = (tl.load(exact_slots + b).to(tl.int64) * H + h) * ((SINK + RECENT) * D)
    key_exact += buffer
    value_exact += buffer
    value_new += head * D
    length = tl.load(lengths + b)
    m, l, sums = _initial_sums(True, score_new, value_new, 1.0, N, D, "fp16", 1)
    m, l, sums = attend_exact(
        key_exact, value_exact, work + 2, length, scaled, per_column, m, l, sums, D, PARTS, SINK, RECENT, PTX, FP8
    )
    _store_part(partial_acc, partial_ml, tl.load(work + 4), h, m, l, 1.0, sums, H, G, N, D, "fp16", 1)


@triton.jit
def _share(work, sequences, lengths, b, T: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Return the length of sequence b, the number of its pages before a program's share, and the share's range of tiles.

    The tiles have positions from SINK to length - RECENT. Pages count from the one with position SINK.
    """
    begin = tl.load(sequences + b * 4)
    low_page = tl.maximum(tl.load(work + 2) - begin, 0)
    high_page = tl.minimum(tl.load(work + 3), tl.load(sequences + b * 4 + 1)) - begin
    length = tl.load(lengths + b)
    PER: tl.constexpr = 64 // T  # tiles of a page
    end = length - RECENT
    low = tl.maximum((SINK // 64 + low_page) * PER, SINK // T)
    high = tl.where(end > SINK, tl.minimum((SINK // 64 + high_page) * PER, tl.cdiv(end, T)), low)
    return length, low_page, low, high


@triton.jit
def _pool_part(
    key_pool, value_pool, key_scale, value_scale, value_block_scale, table, value_new, length, low, high, seeded, h, part, i,
    scaled, per_column, score_new, partial_acc, partial_ml,
    H: tl.constexpr, G: tl.constexpr, T: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [low, high) of the pages, and to the current token if `seeded`.

    part: Pointer to the number of the program's first part, in its row of the work list.
    i: Index of the sequence in this row.
    """
    queries = query_parts(scaled, PARTS, KEY, PTX)
    unit = tl.full((), MIN_SCALE_BITS, tl.int32)
    per_column *= static_scale(key_scale, h, KEY_SCALE)
    factor = static_scale(value_scale, h, VALUE_SCALE)
    if VALUE_SCALE == "group":
        factor = unit.to(tl.float32, bitcast=True)
    elif VALUE_SCALE == "block":
        value_scale = value_block_scale
    m, l, sums = _initial_sums(seeded, score_new, value_new, factor, N, D, VALUE, CHUNKS)

    m, l, unit, sums = attend_pages(
        key_pool, value_pool, key_scale, value_scale, table, low, high, length - RECENT, h, queries, per_column,
        m, l, unit, sums,
        H, T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, SINK, PTX, FP8, STAGES,
    )  # fmt: skip
    if VALUE_SCALE == "group":
        factor = unit.to(tl.float32, bitcast=True)
    number = tl.load(part) + (2 if SINK + RECENT > 0 else 1) * i
    _store_part(partial_acc, partial_ml, number, h, m, l, factor, sums, H, G, N, D, VALUE, CHUNKS)


@triton.jit
def _scaled_query(query, key_new, head, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALING: tl.constexpr):
    """Return a group's queries (D, N) and factors as scale_queries does, and the current token's score."""
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    columns = tl.load(
        query + (head * G + n)[None, :] * D + d[:, None], mask=tl.broadcast_to((n < G)[None, :], (D, N)), other=0.0
    )
    scaled, per_column = scale_queries(columns, SCALING)
    score_new = tl.sum(scaled * tl.load(key_new + head * D + d).to(tl.float32)[:, None], 0) * per_column
    return scaled, per_column, score_new


@triton.jit(do_not_specialize=["table_width"])
def decode_partial(
    query, key_new, value_new, key_pool, value_pool, key_scale, value_scale, value_block_scale, page_table, lengths, work,
    sequences,
    key_exact, value_exact, exact_slots, table_width, partial_acc, partial_ml,
    H: tl.constexpr, G: tl.constexpr, T: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    SCALING: tl.constexpr, PARTS: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to the pages in one row of the work list, for one KV head. Grid (H, Y).

    With exact tokens, additional rows name the sequences whose exact buffers are read. Tensors that the layout lacks are
    None.

    Args:
        query: (B, Hq, D).
        key_new, value_new: (B, H, D), the current token.
        key_pool, value_pool: (pages, H, 64, W).
        key_scale, value_scale: (1) or (H) float32 for KEY_SCALE, VALUE_SCALE "tensor" or "head"; (pages, H, 64, GROUPS)
            float16 for "token" or "group"; None for "none". (1) float32 for "block".
        value_block_scale: (pages, H, 64, GROUPS) bytes of E4M3 for VALUE_SCALE "block", else None.
        page_table: (B, table_width) int32.
        lengths: (B) int32, tokens before the current one.
        work, sequences: (Y, 5) and (B, 4) int32, as plan_work writes them.
        key_exact, value_exact: (buffers, H, E, D) float16.
        exact_slots: (B) int32, exact buffer of every sequence.
        partial_acc: Output (R, Hq, D) float16 or float32, weighted means of the values; numbers without a part are not
            written.
        partial_ml: Output (R, Hq, 2) float32, m and l, the sum of the weights; -inf and 0 of a part without tokens.
    """
    if PDL:  # programs of reduce_parts may occupy free slots from here on, and wait there
        gdc_launch_dependents()
    h = tl.program_id(0)
    work += tl.program_id(1) * 5
    EXACT: tl.constexpr = SINK + RECENT
    count = tl.load(work + 1) - tl.load(work)
    # LICM (loop-invariant code motion) keeps values that all sequences share in registers. It is off for byte keys, because
    # the loop over tiles needs these registers. For 16-bit keys, whose tiles are in registers, some variants spill without it.
    BYTES: tl.constexpr = KEY != "bf16" and KEY != "fp16"
    for i in tl.range(0, count, num_stages=1, disable_licm=BYTES):
        # The row is loaded again in each iteration, also to save registers.
        b = tl.load(work) + i
        head = b * H + h
        length, before, low, high = _share(work, sequences, lengths, b, T, SINK, RECENT)
        scaled, per_column, score_new = _scaled_query(query, key_new, head, G, N, D, SCALING)
        _pool_part(
            key_pool, value_pool, key_scale, value_scale, value_block_scale, page_table + b.to(tl.int64) * table_width,
            value_new + head * D, length, low, high, (EXACT == 0) & (before == 0), h, work + 4, i,
            scaled, per_column, score_new, partial_acc, partial_ml,
            H, G, T, N, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, SINK, RECENT, PTX, FP8, STAGES,
        )  # fmt: skip
    if EXACT > 0:  # noqa: SIM102  (the outer condition is evaluated at compile time)
        if count == 0:
            _exact_part(
                query, key_new, value_new, key_exact, value_exact, exact_slots, lengths, h, work, partial_acc, partial_ml,
                H, G, N, D, SCALING, PARTS, SINK, RECENT, PTX, FP8,
            )  # fmt: skip
