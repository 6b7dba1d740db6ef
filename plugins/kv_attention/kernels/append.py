"""Quantize-on-write: the new token of every sequence into the pools and the exact buffers of all layers, in one launch.

Shapes: L layers, B sequences, H KV heads, D head_dim, N pages of a layer, P pages of a row of the table, M exact buffers, W
storage elements and g stored scales of a token, R heads of one program, n groups of s channels in a tile (R, n, s).

Bit for bit the arithmetic of plugins/kv_attention/reference.py, in float32: divisions round correctly, halves go to even
codes, and what is not a number is told from the bits of the input, because a GPU's arithmetic forgets the sign of NaN.
"""

import triton
import triton.language as tl

PAGE: tl.constexpr = tl.constexpr(64)
MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-14)
MAX_SCALE: tl.constexpr = tl.constexpr(65504.0)


@triton.jit(do_not_specialize=["pages", "table_width", "buffers"])
def append(
    key_new, value_new, page_table, lengths, exact_slots,
    key_pool_in, key_scale, key_scale_pool_in, value_pool_in, value_scale, value_scale_pool_in, key_exact_in, value_exact_in,
    pages, table_width, buffers,
    key_pool, key_scale_pool, value_pool, value_scale_pool, key_exact, value_exact,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(H / R), B, L). key_new, value_new (L, B, H, D) float32, float16 or bfloat16; page_table (B, P), lengths (B),
    exact_slots (B) int32; pools (L, N, H, 64, W), scale pools (L, N, H, 64, g), exact buffers (L, M, H, E, D), written at
    position lengths[b], which the table must reach; pages = N, table_width = P, buffers = M.

    Static scales are (L, KEY_SCALES), one or H a layer; key_scale is None without, as key_scale_pool is without dynamic ones.
    float8 pools are seen as uint8. GROUPS is g of the values. FP8: the target rounds float32 to float8 at once.
    The `_in` tensors are not read: TensorRT passes a tensor that is written in place twice, as an input and as an output.
    """
    heads = tl.program_id(0) * R + tl.arange(0, R)
    b, layer = tl.program_id(1), tl.program_id(2)
    source = (layer * tl.num_programs(1) + b) * H + heads
    position = tl.load(lengths + b)
    page = tl.load(page_table + b * table_width + position // PAGE)
    row = ((layer.to(tl.int64) * pages + page) * H + heads) * PAGE + position % PAGE
    if SINK + RECENT > 0:
        buffer = tl.load(exact_slots + b)
        slot = ((layer.to(tl.int64) * buffers + buffer) * H + heads) * (SINK + RECENT)
    else:
        slot = row
    _append_side(
        key_new, key_scale, key_pool, key_scale_pool, key_exact, layer, heads, source, row, slot, position,
        H, D, R, KEY, KEY_SCALES, 1, SINK, RECENT, FP8,
    )  # fmt: skip
    _append_side(
        value_new, value_scale, value_pool, value_scale_pool, value_exact, layer, heads, source, row, slot, position,
        H, D, R, VALUE, VALUE_SCALES, GROUPS, SINK, RECENT, FP8,
    )  # fmt: skip


@triton.jit
def _append_side(
    new, static_scale, pool, scale_pool, exact, layer, heads, source, row, slot, position,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Keys or values of R heads. `source`, `row`, `slot` (R): rows of `new`, of the pools, and of the exact buffer."""
    # A byte of int4 holds channels d and d + D / 2: they are two tiles.
    PARTS: tl.constexpr = 2 if DTYPE == "int4" else 1
    W: tl.constexpr = D // PARTS
    n: tl.constexpr = GROUPS // PARTS if GROUPS > PARTS else 1
    s: tl.constexpr = W // n
    group = tl.arange(0, n)
    channel = (group[:, None] * s + tl.arange(0, s)[None, :])[None, :, :]
    inside = tl.broadcast_to((heads < H)[:, None, None], (R, n, s))

    parts = ()
    for part in tl.static_range(PARTS):
        x, negative = _widen(tl.load(new + source[:, None, None] * D + part * W + channel, mask=inside, other=0))
        parts = parts + ((x, negative),)
        if SINK > 0:
            place = exact + (slot + position)[:, None, None] * D + part * W + channel
            tl.store(place, x.to(tl.float16), mask=inside & (position < SINK))
        if RECENT > 0:
            place = exact + (slot + SINK + position % RECENT)[:, None, None] * D + part * W + channel
            tl.store(place, x.to(tl.float16), mask=inside)

    place = pool + row[:, None, None] * W + channel
    if static_scale is not None:
        scales = tl.load(static_scale + layer * SCALES + heads % SCALES)[:, None]
        stored = _encode(parts[0], scales, DTYPE, FP8).to(pool.dtype.element_ty)
    elif scale_pool is not None:
        scale_place = scale_pool + row[:, None] * GROUPS + group[None, :]
        stored = _quantize(parts, scale_place, heads < H, R, n, DTYPE, GROUPS, FP8).to(pool.dtype.element_ty)
    elif DTYPE == "bf16":
        stored = round_to_bfloat16(parts[0][0])
    else:
        stored = parts[0][0].to(tl.float16)
    tl.store(place, stored, mask=inside)


@triton.jit
def _quantize(
    parts, scale_place, inside, R: tl.constexpr, n: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr
):
    """Parts (R, n, s) of new tokens -> codes (R, n, s) as int32, packed; their scales go to `scale_place` (R, n)."""
    LIMIT: tl.constexpr = 448.0 if DTYPE == "fp8_e4m3" else 127.0 if DTYPE == "int8" else 7.0
    mask = tl.broadcast_to(inside[:, None], (R, n))
    if DTYPE != "int4":
        scales = _stored_scale(_largest(parts[0][0]), LIMIT)
        tl.store(scale_place, scales, mask=mask)
        codes = _encode(parts[0], scales.to(tl.float32), DTYPE, FP8)
    else:
        low, high = _largest(parts[0][0]), _largest(parts[1][0])
        if GROUPS == 1:
            low = tl.maximum(low, high)
            high = low
        low, high = _stored_scale(low, LIMIT), _stored_scale(high, LIMIT)
        tl.store(scale_place, low, mask=mask)
        if GROUPS > 1:
            tl.store(scale_place + n, high, mask=mask)
        codes = 16 * _encode(parts[1], high.to(tl.float32), DTYPE, FP8)
        codes += _encode(parts[0], low.to(tl.float32), DTYPE, FP8) + 8
    return codes


@triton.jit
def _widen(raw):
    """float32, float16 or bfloat16 -> float32, and whether the sign bit is set, of NaN too."""
    if raw.dtype == tl.float32:
        bits = raw.to(tl.int32, bitcast=True)
        x = raw
    else:
        bits = raw.to(tl.int16, bitcast=True)
        # The interpreter has no arithmetic of bfloat16, and its conversion loses subnormals.
        shifted = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        x = shifted if raw.dtype == tl.bfloat16 else raw.to(tl.float32)
    return x, bits < 0


@triton.jit
def _largest(x):
    """Largest magnitude (R, n) of the numbers in every group."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), 2)


@triton.jit
def _stored_scale(largest, LIMIT: tl.constexpr):
    exact = tl.math.div_rn(largest, LIMIT)
    return tl.minimum(tl.maximum(exact, MIN_SCALE), MAX_SCALE).to(tl.float16)


@triton.jit
def _encode(part, scales, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Numbers (R, n, s) and their signs, over scales (R, n) -> codes as int32, saturating: whole numbers or bits of e4m3."""
    x, negative = part
    steps = tl.math.div_rn(x, tl.broadcast_to(scales[:, :, None], x.shape))
    if DTYPE == "fp8_e4m3":
        codes = tl.where(x == x, _magnitude_e4m3(steps, FP8), 0x7F) | tl.where(negative, 0x80, 0)
    else:
        LIMIT: tl.constexpr = 127.0 if DTYPE == "int8" else 7.0
        steps = tl.minimum(tl.maximum(tl.where(x == x, steps, 0.0), -LIMIT), LIMIT)
        # Numbers from 2^23 to 2^24 are whole: adding rounds, halves to even. 0x4B400000 are the bits of 1.5 * 2^23.
        codes = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return codes


@triton.jit
def _magnitude_e4m3(x, FP8: tl.constexpr):
    """float32 that is a number -> bits of the e4m3 nearest to its magnitude, ties to even, saturating at 448; int32."""
    if FP8:
        nearest = tl.minimum(tl.abs(x), 448.0).to(tl.float8e4nv)
        return nearest.to(tl.uint8, bitcast=True).to(tl.int32)
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x43E00000)
    # Half a unit in the last of three mantissa places, less one where that place is even; then 127 - 7 off the exponent.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the unit in the last place of 2^14.
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(bits < 0x3C800000, subnormal, normal)


@triton.jit
def round_to_bfloat16(x):
    """float32 -> bfloat16, ties to even: by integers, because the interpreter's own conversion truncates."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
