"""First kernel of the attention, split-K: partial sums over the quantized pages, divided by the work list of plan.py.

Shapes: B sequences, H KV heads, G query heads of each, Hq = H * G, D head_dim, N = max(8, G rounded up to a power of two)
columns, T tokens of a tile, which is a page of 64 or a half or a quarter of one, W stored elements of a value row, C channels
of a chunk of it, E exact slots, Y programs of a KV head, R parts, which are what programs compute of a sequence each.

One program attends with one KV head to its share of all sequences' pages, sequence by sequence. Operands are swapped: scores
(T, N) = keys (T, D) x query^T (D, N) and sums (D, N) += values^T (D, T) x p (T, N), so that the query group is the matrix
instruction's N of 8 and nothing is computed for padding when G is 8.

Scores are in log2 units. The weights p are 2^(score - m) with m = maximum - 15, so that float16 holds them with full
precision down to 2^-29 of the largest. A value scale is folded into p, divided by the largest scale of this part so far
rounded up to a power of two, so that neither tiny nor huge scales leave float16's range. Of nvfp4 the product of a code and its
block's scale is a float16 without rounding, and the layer's scale is one factor of the sums.
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.codes import decode, streams_of
from plugins.kv_attention.kernels.nvfp4 import NVFP4_GAIN
from plugins.kv_attention.kernels.tiles import (
    channels,
    decode_values,
    load_rows,
    load_scales,
    load_values,
    with_block_scales,
)

LOG2_E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(15.0)
P_MAX = tl.constexpr(32768.0)
"""2^HEADROOM: the weight of the largest score."""
MIN_SCALE_BITS = tl.constexpr(0x38800000)
"""Bits of 2^-14 as float32, the smallest stored scale."""


@triton.jit
def _power_above(x):
    """Return the bits of the power of two at or above a positive normal float32; 0 for 0."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000


@triton.jit
def _inverse(bits):
    """Return the inverse of the power of two with these bits, computed from its exponent."""
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(values, p, sums, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Return sums (C, N) + values^T (C, T) x p (T, N).

    bfloat16 takes p as two terms, because its 8 bits alone would cost a relative error of 1e-3.
    """
    if DTYPE == "bf16":
        if PTX:
            high = p.to(tl.bfloat16)
            low = (p - high.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(tl.trans(values), high, tl.dot(tl.trans(values), low, sums))
        else:
            sums = tl.dot(tl.trans(values), p, sums)
    else:
        sums = tl.dot(tl.trans(values), p.to(tl.float16), sums)
    return sums


@triton.jit
def _attend_tile(
    block, keys, values, key_scales, value_scales, visible, queries, per_column, m, l, unit, sums,
    T: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr,
    VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Attend to tile number `block` of a pool, which is T tokens of a (page, head). Returns the new m, l, unit and sums.

    MASKED: only tokens that are `visible` (T) are read. `unit`: bits of a float32 power of two; where value scales are folded
    into p, `sums` are in multiples of it.
    """
    STREAMS: tl.constexpr = streams_of(VALUE)
    W: tl.constexpr = D // STREAMS
    C: tl.constexpr = W // CHUNKS
    t = tl.arange(0, T)
    codes = load_rows(keys + block * (T * D) + (t[:, None] * D + tl.arange(0, D)[None, :]), visible, T, D, MASKED)
    stored = load_values(values, block, visible, T, D, VALUE, CHUNKS, MASKED)
    scales = ()
    if VALUE_SCALE == "group":
        scales = load_scales(value_scales, block, visible, T, GROUPS, MASKED)
    elif VALUE_SCALE == "block":
        stored = with_block_scales(stored, value_scales, block, visible, T, D, CHUNKS, MASKED)

    decoded = decode(codes, KEY, PTX, FP8)
    scores = tl.dot(decoded, queries[0])
    if PARTS == 2:
        scores = tl.dot(decoded, queries[1], scores)
    if KEY_SCALE == "token":
        scores *= load_scales(key_scales, block, visible, T, 1, MASKED)[0][:, None]
    if MASKED:
        scores = tl.where(visible[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 0) * per_column - HEADROOM)
    p = tl.math.exp2(scores * per_column[None, :] - m_new[None, :])
    decay = tl.math.exp2(m - m_new)
    l = l * decay + tl.sum(p, 0)

    if VALUE_SCALE == "group":
        largest = unit
        for g in tl.static_range(GROUPS):
            largest = tl.maximum(largest, _power_above(tl.max(scales[g], 0)))
        decay *= unit.to(tl.float32, bitcast=True) * _inverse(largest)
        unit = largest

    summed = ()
    for c in tl.static_range(CHUNKS):
        streams = decode_values(stored[c], T, C, VALUE, PTX, FP8)
        for s in tl.static_range(STREAMS):
            weights = p
            if VALUE_SCALE == "group":
                weights = p * (scales[(s * W + c * C) * GROUPS // D] * _inverse(unit))[:, None]
            summed = summed + (_weigh(streams[s], weights, sums[c * STREAMS + s] * decay[None, :], PTX, VALUE),)
    return m_new, l, unit, summed


@triton.jit
def _query_parts(scaled, PARTS: tl.constexpr, KEY: tl.constexpr, PTX: tl.constexpr):
    """Return `scaled` (D, N) float32, |x| < 2, as one or two terms of the type that keys are decoded to."""
    if KEY != "bf16":
        high = scaled.to(tl.float16)
    elif PTX:
        high = scaled.to(tl.bfloat16)
    else:
        high = scaled
    parts = (high,)
    if PARTS == 2:
        parts = (high, (scaled - high.to(tl.float32)).to(high.dtype))
    return parts


@triton.jit
def _seed(seeded, score, value_new, unit, N: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the initial m, l and sums, in multiples of `unit`: of the current token, or of no token if not `seeded`."""
    STREAMS: tl.constexpr = streams_of(VALUE)
    C: tl.constexpr = D // STREAMS // CHUNKS
    m = tl.where(seeded, score - HEADROOM, float("-inf"))
    l = tl.where(seeded, P_MAX, 0.0) + tl.zeros((N,), tl.float32)
    sums = ()
    for c in tl.static_range(CHUNKS):
        for s in tl.static_range(STREAMS):
            value = tl.load(value_new + s * (D // STREAMS) + c * C + channels(VALUE, C)).to(tl.float32)
            value = tl.where(seeded, value * (P_MAX / unit), 0.0)
            sums = sums + (value[:, None] + tl.zeros((C, N), tl.float32),)
    return m, l, sums


@triton.jit
def _store(
    partial_acc, partial_ml, row, rows, m, l, unit, sums,
    N: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the results of a part. row (N): number of the (part, query head); rows (N): query heads that exist."""
    STREAMS: tl.constexpr = streams_of(VALUE)
    C: tl.constexpr = D // STREAMS // CHUNKS
    for c in tl.static_range(CHUNKS):
        for s in tl.static_range(STREAMS):
            d = s * (D // STREAMS) + c * C + channels(VALUE, C)
            mask = tl.broadcast_to(rows[None, :], (C, N))
            tl.store(partial_acc + row[None, :] * D + d[:, None], sums[c * STREAMS + s] * unit, mask=mask)
    tl.store(partial_ml + row * 2, m, mask=rows)
    tl.store(partial_ml + row * 2 + 1, l, mask=rows)


@triton.jit
def _exact_part(
    key_exact, value_exact, value_new, length, row, rows, scaled, per_column, score_new, partial_acc, partial_ml,
    N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend to the current token, the sinks and the recent tokens, all unquantized."""
    # There are few of these wide rows; larger tiles of them would take registers from the whole kernel.
    T: tl.constexpr = 16
    queries = _query_parts(scaled, PARTS, "fp16", PTX)
    m, l, sums = _seed(True, score_new, value_new, 1.0, N, D, "fp16", 1)
    unit = tl.full((), MIN_SCALE_BITS, tl.int32)
    for first in tl.range(0, SINK + RECENT, T, num_stages=1):
        slot = first + tl.arange(0, T)
        visible = slot < tl.minimum(length, SINK)
        if RECENT > 0:
            # The slot with residue r holds position length - 1 - age, age = (length - 1 - r) mod RECENT.
            age = (length - 1 + RECENT - (slot - SINK)) % RECENT
            visible = visible | ((slot >= SINK) & (slot < SINK + RECENT) & (length - 1 - age >= SINK))
        m, l, unit, sums = _attend_tile(
            0, key_exact + first * D, value_exact + first * D, None, None, visible, queries, per_column, m, l, unit, sums,
            T, D, PARTS, "fp16", "none", "fp16", "none", 0, 1, True, PTX, FP8,
        )  # fmt: skip
    _store(partial_acc, partial_ml, row, rows, m, l, 1.0, sums, N, D, "fp16", 1)


@triton.jit
def _tiles(length, low_page, high_page, T: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Return the first tile with a position from SINK to length - RECENT in a range of pages, and the one after the last.

    Pages count from the one with position SINK.
    """
    PER: tl.constexpr = 64 // T  # tiles of a page
    end = length - RECENT
    low = tl.maximum((SINK // 64 + low_page) * PER, SINK // T)
    high = tl.where(end > SINK, tl.minimum((SINK // 64 + high_page) * PER, tl.cdiv(end, T)), low)
    return low, high


@triton.jit
def _pool_part(
    key_pool, value_pool, key_scale, value_scale, value_block_scale, table, value_new, length, low, high, seeded, h, row, rows,
    scaled, per_column, score_new, partial_acc, partial_ml,
    H: tl.constexpr, T: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [low, high), from the pages, and if `seeded` to the current token."""
    queries = _query_parts(scaled, PARTS, KEY, PTX)
    unit = tl.full((), MIN_SCALE_BITS, tl.int32)
    factor = 1.0
    if KEY_SCALE == "tensor":
        per_column *= tl.load(key_scale)
    elif KEY_SCALE == "head":
        per_column *= tl.load(key_scale + h)
    if VALUE_SCALE == "tensor":
        factor = tl.load(value_scale)
    elif VALUE_SCALE == "head":
        factor = tl.load(value_scale + h)
    elif VALUE_SCALE == "group":
        factor = unit.to(tl.float32, bitcast=True)
    elif VALUE_SCALE == "block":
        factor = tl.load(value_scale) * NVFP4_GAIN
        value_scale = value_block_scale
    m, l, sums = _seed(seeded, score_new, value_new, factor, N, D, VALUE, CHUNKS)

    # Of the part's tiles those in [whole_low, whole_high) are whole; at most one before and one after is not.
    PER: tl.constexpr = 64 // T  # tiles of a page
    end = length - RECENT
    whole_low = tl.minimum(tl.maximum(low, (SINK + T - 1) // T), high)
    whole_high = tl.maximum(tl.minimum(high, end // T), whole_low)
    for tile in tl.range(whole_low, whole_high, num_stages=STAGES):
        block = (tl.load(table + tile // PER).to(tl.int64) * H + h) * PER + tile % PER
        m, l, unit, sums = _attend_tile(
            block, key_pool, value_pool, key_scale, value_scale, None, queries, per_column, m, l, unit, sums,
            T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, False, PTX, FP8,
        )  # fmt: skip
    before = whole_low - low
    for edge in tl.range(0, before + high - whole_high, num_stages=1):
        tile = tl.where(edge < before, low, whole_high)
        position = tile * T + tl.arange(0, T)
        block = (tl.load(table + tile // PER).to(tl.int64) * H + h) * PER + tile % PER
        m, l, unit, sums = _attend_tile(
            block, key_pool, value_pool, key_scale, value_scale, (position >= SINK) & (position < end),
            queries, per_column, m, l, unit, sums,
            T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, True, PTX, FP8,
        )  # fmt: skip
    if VALUE_SCALE == "group":
        factor = unit.to(tl.float32, bitcast=True)
    _store(partial_acc, partial_ml, row, rows, m, l, factor, sums, N, D, VALUE, CHUNKS)


@triton.jit
def _scaled_query(query, key_new, head, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALING: tl.constexpr):
    """Return a group's queries (D, N), each divided by a power of two, the factor of its scores, and the current token's score.

    The power of two is near the query's largest magnitude, so that it and its products fit float16.
    """
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    columns = tl.load(
        query + (head * G + n)[None, :] * D + d[:, None], mask=tl.broadcast_to((n < G)[None, :], (D, N)), other=0.0
    )
    columns = columns.to(tl.float32)
    power = tl.max(tl.abs(columns), 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, 0x21800000), 0x7E800000)
    scaled = columns * _inverse(power)[None, :]
    per_column = power.to(tl.float32, bitcast=True) * (SCALING * LOG2_E)
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
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with one KV head to the pages that a row of the work list names. Grid (H, Y).

    With exact tokens, rows of their own name the sequences whose exact buffers are read. Tensors that the layout does not have
    are None.

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
        exact_slots: (B) int32, exact buffer of each sequence.
        partial_acc: Output (R, Hq, D) float32, sums of weighted values; those of numbers without a part are not written.
        partial_ml: Output (R, Hq, 2) float32, m and l; -inf and 0 of a part without tokens.
    """
    h = tl.program_id(0)
    work += tl.program_id(1) * 5
    EXACT: tl.constexpr = SINK + RECENT
    n = tl.arange(0, N)
    rows = n < G
    count = tl.load(work + 1) - tl.load(work)
    for i in tl.range(0, count, num_stages=1):
        # The row is read again for each sequence: what is kept meanwhile takes registers from the loop over tiles.
        b = tl.load(work) + i
        part = tl.load(work + 4) + (2 if EXACT > 0 else 1) * i
        head = b * H + h
        begin = tl.load(sequences + b * 4)
        before = tl.maximum(tl.load(work + 2) - begin, 0)
        pages = tl.minimum(tl.load(work + 3), tl.load(sequences + b * 4 + 1)) - begin
        length = tl.load(lengths + b)
        low, high = _tiles(length, before, pages, T, SINK, RECENT)
        scaled, per_column, score_new = _scaled_query(query, key_new, head, G, N, D, SCALING)
        _pool_part(
            key_pool, value_pool, key_scale, value_scale, value_block_scale, page_table + b.to(tl.int64) * table_width,
            value_new + head * D, length, low, high, (EXACT == 0) & (before == 0), h, (part.to(tl.int64) * H + h) * G + n, rows,
            scaled, per_column, score_new, partial_acc, partial_ml,
            H, T, N, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, SINK, RECENT, PTX, FP8, STAGES,
        )  # fmt: skip
    if EXACT > 0:  # noqa: SIM102  (one condition is the compiler's, the other the program's)
        if count == 0:
            b = tl.load(work)
            head = b * H + h
            scaled, per_column, score_new = _scaled_query(query, key_new, head, G, N, D, SCALING)
            buffer = (tl.load(exact_slots + b).to(tl.int64) * H + h) * (EXACT * D)
            _exact_part(
                key_exact + buffer, value_exact + buffer, value_new + head * D, tl.load(lengths + b),
                (tl.load(work + 4).to(tl.int64) * H + h) * G + n, rows, scaled, per_column, score_new, partial_acc, partial_ml,
                N, D, PARTS, SINK, RECENT, PTX, FP8,
            )  # fmt: skip
