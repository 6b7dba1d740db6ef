"""Attention to one tile, to a range of pages and to the exact tokens, and the join of parts, for decoding and for contexts.

Shapes: N columns, which are query rows, T tokens of a tile, D head_dim, C channels of a chunk of a value row.

The state of a column is m, l and sums. Scores are in log2 units. m is the maximum of the scores up to now, minus HEADROOM. The
weight p of a token is 2^(score - m). l is the sum of the weights, and `sums` are the values multiplied by p and added up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from plugins.kv_attention.kernels.append import round_to_bfloat16
from plugins.kv_attention.kernels.codes import decode, streams_of
from plugins.kv_attention.kernels.nvfp4 import NVFP4_GAIN
from plugins.kv_attention.kernels.tiles import (
    append_block_scales,
    decode_values,
    load_rows,
    load_scales,
    load_values,
    sort_by_channel,
)

LOG2_E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(15.0)
P_MAX = tl.constexpr(32768.0)
"""2^HEADROOM: the weight of the largest score."""
HALF_MAX = tl.constexpr(65504.0)
"""The largest float16."""
MIN_SCALE_BITS = tl.constexpr(0x38800000)
"""Bits of 2^-14 as float32, the smallest stored scale."""


@triton.jit
def _power_above(x):
    """Return the bits of the smallest power of two that is at least x, a positive normal float32; 0 for 0."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000


@triton.jit
def inverse_power(bits):
    """Return the inverse of a power of two, given as float32 bits, by negating its exponent."""
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_queries(columns, SCALING: tl.constexpr):
    """Return queries (D, N) divided by a power of two each, and the factors (N) that undo this in their scores.

    The power of two is near the query's largest magnitude, so that the divided query and its products fit float16.
    """
    columns = columns.to(tl.float32)
    power = tl.max(tl.abs(columns), 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, 0x21800000), 0x7E800000)  # the bits of 2^-60 and 2^126
    return columns * inverse_power(power)[None, :], power.to(tl.float32, bitcast=True) * (SCALING * LOG2_E)


@triton.jit
def accumulate_values(values, p, sums, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Return sums (C, N) + values^T (C, T) x p (T, N).

    For bfloat16, p is split into two terms, because 8 bits alone have a relative error of 1e-3.
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
def attend_tile(
    block, keys, values, key_scales, value_scales, visible, queries, per_column, m, l, unit, sums,
    T: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr,
    VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Attend to tile number `block` of a pool, which is T tokens of a (page, head). Returns the new m, l, unit and sums.

    MASKED: read only tokens that are `visible` (T). `unit`: bits of a float32 power of two, the unit of `sums` if value
    scales are folded into p.
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
        stored = append_block_scales(stored, value_scales, block, visible, T, D, CHUNKS, MASKED)

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
        decay *= unit.to(tl.float32, bitcast=True) * inverse_power(largest)
        unit = largest

    summed = ()
    for c in tl.static_range(CHUNKS):
        streams = decode_values(stored[c], T, C, VALUE, PTX, FP8)
        for s in tl.static_range(STREAMS):
            weights = p
            if VALUE_SCALE == "group":
                weights = p * (scales[(s * W + c * C) * GROUPS // D] * inverse_power(unit))[:, None]
            summed = summed + (accumulate_values(streams[s], weights, sums[c * STREAMS + s] * decay[None, :], PTX, VALUE),)
    return m_new, l, unit, summed


@triton.jit
def query_parts(scaled, PARTS: tl.constexpr, KEY: tl.constexpr, PTX: tl.constexpr):
    """Split `scaled` (D, N) float32, |x| < 2, into PARTS terms of the type of decoded keys."""
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
def static_scale(scale, h, KIND: tl.constexpr):
    """Return the factor of decoded numbers that all tokens share; 1 for dynamic scales and unquantized numbers."""
    factor = 1.0
    if KIND == "tensor":
        factor = tl.load(scale)
    elif KIND == "head":
        factor = tl.load(scale + h)
    elif KIND == "block":
        factor = tl.load(scale) * NVFP4_GAIN
    return factor


@triton.jit
def store_partials(
    partial_acc, partial_ml, row, rows, m, l, unit, sums,
    N: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the results of a part: its means of the values, m and l. `row` (N): index of the columns' results; `rows` (N): mask
    of existing columns; `unit`: unit of `sums`.

    A mean is at most the largest value, so float16 represents it if the cached values are in float16's range. Larger means
    saturate; infinity and NaN are kept.
    """
    STREAMS: tl.constexpr = streams_of(VALUE)
    C: tl.constexpr = D // STREAMS // CHUNKS
    per_weight = unit / tl.where(l == 0.0, 1.0, l)
    for c in tl.static_range(CHUNKS):
        for s in tl.static_range(STREAMS):
            d = s * (D // STREAMS) + c * C + tl.arange(0, C)
            mask = tl.broadcast_to(rows[None, :], (C, N))
            means = sums[c * STREAMS + s] * per_weight[None, :]
            if partial_acc.dtype.element_ty == tl.float16:
                means = tl.where(tl.abs(means) < float("inf"), tl.clamp(means, -HALF_MAX, HALF_MAX), means)
            means = sort_by_channel(means.to(partial_acc.dtype.element_ty), N, VALUE, C)
            tl.store(partial_acc + row[None, :] * D + d[:, None], means, mask=mask)
    tl.store(partial_ml + row * 2, m, mask=rows)
    tl.store(partial_ml + row * 2 + 1, l, mask=rows)


@triton.jit
def attend_exact(
    key_exact, value_exact, origin, length, scaled, per_column, m, l, sums,
    D: tl.constexpr, PARTS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend to the sinks and the recent tokens of one exact buffer and head. Returns the new m, l and sums.

    origin: None, or a pointer to 0. Loading it in each iteration keeps the compiler from holding all addresses in registers.
    """
    # Exact tokens are few, and larger tiles of their wide rows would take registers from the whole kernel.
    T: tl.constexpr = 16
    queries = query_parts(scaled, PARTS, "fp16", PTX)
    unit = tl.full((), MIN_SCALE_BITS, tl.int32)
    for first in tl.range(0, SINK + RECENT, T, num_stages=1):
        slot = first + tl.arange(0, T)
        visible = slot < tl.minimum(length, SINK)
        if RECENT > 0:
            # The slot with residue r holds position length - 1 - age, age = (length - 1 - r) mod RECENT.
            age = (length - 1 + RECENT - (slot - SINK)) % RECENT
            visible = visible | ((slot >= SINK) & (slot < SINK + RECENT) & (length - 1 - age >= SINK))
        low = first * D
        if origin is not None:
            low = (first + tl.load(origin)) * D
        m, l, unit, sums = attend_tile(
            0, key_exact + low, value_exact + low, None, None, visible, queries, per_column, m, l, unit, sums,
            T, D, PARTS, "fp16", "none", "fp16", "none", 0, 1, True, PTX, FP8,
        )  # fmt: skip
    return m, l, sums


@triton.jit
def attend_pages(
    key_pool, value_pool, key_scale, value_scale, table, low, high, end, h, queries, per_column, m, l, unit, sums,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, SINK: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the positions from SINK to before `end` of tiles [low, high). Returns the new m, l, unit and sums."""
    # Tiles in [whole_low, whole_high) need no mask. At most one tile before and one tile after them need one.
    PER: tl.constexpr = 64 // T  # tiles of a page
    whole_low = tl.minimum(tl.maximum(low, (SINK + T - 1) // T), high)
    whole_high = tl.maximum(tl.minimum(high, end // T), whole_low)
    for tile in tl.range(whole_low, whole_high, num_stages=STAGES):
        block = (tl.load(table + tile // PER).to(tl.int64) * H + h) * PER + tile % PER
        m, l, unit, sums = attend_tile(
            block, key_pool, value_pool, key_scale, value_scale, None, queries, per_column, m, l, unit, sums,
            T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, False, PTX, FP8,
        )  # fmt: skip
    before = whole_low - low
    for edge in tl.range(0, before + high - whole_high, num_stages=1):
        tile = tl.where(edge < before, low, whole_high)
        position = tile * T + tl.arange(0, T)
        block = (tl.load(table + tile // PER).to(tl.int64) * H + h) * PER + tile % PER
        m, l, unit, sums = attend_tile(
            block, key_pool, value_pool, key_scale, value_scale, (position >= SINK) & (position < end),
            queries, per_column, m, l, unit, sums,
            T, D, PARTS, KEY, KEY_SCALE, VALUE, VALUE_SCALE, GROUPS, CHUNKS, True, PTX, FP8,
        )  # fmt: skip
    return m, l, unit, sums


@triton.jit(do_not_specialize=["splits"])
def reduce_parts(
    partial_acc, partial_ml, sequences, splits, out,
    HQ: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query head of a row, a sequence of a decode step or a new token of a context. Grid (rows * Hq).

    Args:
        partial_acc: (R, Hq, D) float16 or float32, means of the values. In a decode step, means of a part without tokens are
            zeros; in a context they are not read.
        partial_ml: (R, Hq, 2) float32, m and l; a part without tokens has l = 0 and m = -inf. No row's first part is empty.
        sequences: (rows, 4) int32, as plan_work writes it; None for a context, in which every row has `splits` parts.
        splits: S; None with `sequences`.
        out: (rows, Hq, D).
        CHUNK: Parts that are read at once.
        ROUND: Round to bfloat16 by integer arithmetic (`round_to_bfloat16`).
        PDL: The kernel may begin before the previous one has ended, and then waits for the parts.
    """
    head = tl.program_id(0) % HQ
    b = tl.program_id(0) // HQ
    if sequences is None:
        first = b * splits
        parts = splits
    else:
        first = tl.load(sequences + b * 4 + 2)
        parts = tl.load(sequences + b * 4 + 3)
    if PDL:
        gdc_wait()
    d = tl.arange(0, D)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((D,), tl.float32)
    for chunk in tl.range(0, parts, CHUNK):
        part = chunk + tl.arange(0, CHUNK)
        row = (first + part).to(tl.int64) * HQ + head
        present = part < parts
        part_m = tl.load(partial_ml + row * 2, mask=present, other=float("-inf"))
        part_l = tl.load(partial_ml + row * 2 + 1, mask=present, other=0.0)
        if sequences is None:
            present = part_m > float("-inf")
        means = tl.load(
            partial_acc + row[:, None] * D + d[None, :], mask=tl.broadcast_to(present[:, None], (CHUNK, D)), other=0.0
        )
        # `largest` is finite, because the first part contains the current token.
        largest = tl.maximum(m, tl.max(part_m, 0))
        decay = tl.math.exp2(m - largest)
        weight = tl.math.exp2(part_m - largest)
        weight *= part_l
        l = l * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(means.to(tl.float32) * weight[:, None], 0)
        m = largest
    acc /= l
    if ROUND:
        acc = round_to_bfloat16(acc)
    tl.store(out + (b.to(tl.int64) * HQ + head) * D + d, acc.to(out.dtype.element_ty))
