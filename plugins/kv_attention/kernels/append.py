"""Quantizes the new token of every sequence and stores it in the pools and exact buffers of all layers, in one launch.

Shapes: L layers, B sequences, H KV heads, D head_dim, N pages of a layer, P columns of the page table, M exact buffers, W
storage elements and g stored scales of a token, R heads of one program, n groups of s channels in a tile (R, n, s).

The arithmetic equals the reference engine's bit for bit. It uses float32: divisions are correctly rounded, ties go
to even codes, and the sign of NaN is read from the bits of the input, because a GPU's arithmetic does not keep it.
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.codes import streams_of
from plugins.kv_attention.kernels.nvfp4 import e4m3_to_float32, encode_e2m1

PAGE: tl.constexpr = tl.constexpr(64)
MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-14)
MAX_SCALE: tl.constexpr = tl.constexpr(65504.0)
SMALLEST_BLOCK_SCALE: tl.constexpr = tl.constexpr(2.0**-9)


@triton.jit(do_not_specialize=["pages", "table_width", "buffers"])
def append(
    key_new, value_new, page_table, lengths, exact_slots, key_scale, value_scale, pages, table_width, buffers,
    key_pool, key_scale_pool, value_pool, value_scale_pool, key_exact, value_exact,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    KEY: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE: tl.constexpr, VALUE_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Quantize and store one token of R heads of one sequence and layer. Grid (ceil(H / R), B, L).

    Tensors that the layout lacks are None. float8 pools are passed as uint8.

    Args:
        key_new, value_new: (L, B, H, D) float32, float16 or bfloat16.
        page_table: (B, P) int32 with a page for position lengths[b], or (B, 1) with only that page.
        lengths: (B) int32, the position to write; a negative position writes nothing.
        exact_slots: (B) int32; m writes sinks and recent tokens to exact buffer m, -1 - m writes only sinks to it.
        key_scale, value_scale: Static scales (L, KEY_SCALES) and (L, VALUE_SCALES) float32, one or H per layer (nvfp4: one).
        pages, table_width, buffers: N, P and M.
        key_pool, value_pool: (L, N, H, 64, W).
        key_scale_pool, value_scale_pool: Dynamic scales (L, N, H, 64, g) float16 (nvfp4: E4M3, as uint8).
        key_exact, value_exact: (L, M, H, E, D) float16.
        GROUPS: g of the values, at least 1.
        FP8: Whether the target converts float32 to float8 in one rounding.
    """
    heads = tl.program_id(0) * R + tl.arange(0, R)
    b, layer = tl.program_id(1), tl.program_id(2)
    source = ((layer * tl.num_programs(1) + b) * H + heads).to(tl.int64)  # multiplied by D it may exceed 2^31
    position = tl.load(lengths + b)
    # The device decides whether to store, so that a captured step can skip sequences that its own checks refuse.
    column = tl.minimum(position // PAGE, table_width - 1)
    page = tl.load(page_table + b * table_width + column, mask=position >= 0, other=0)
    store_mask = (heads < H) & (position >= 0)
    row = ((layer.to(tl.int64) * pages + page) * H + heads) * PAGE + position % PAGE
    if SINK + RECENT > 0:
        buffer = tl.load(exact_slots + b)
        newest = store_mask & (buffer >= 0)
        buffer = tl.where(buffer < 0, -1 - buffer, buffer)
        slot = ((layer.to(tl.int64) * buffers + buffer) * H + heads) * (SINK + RECENT)
    else:
        slot, newest = row, store_mask
    _append_side(
        key_new, key_scale, key_pool, key_scale_pool, key_exact,
        layer, heads, store_mask, newest, source, row, slot, position,
        H, D, R, KEY, KEY_SCALES, 1, SINK, RECENT, FP8,
    )  # fmt: skip
    _append_side(
        value_new, value_scale, value_pool, value_scale_pool, value_exact,
        layer, heads, store_mask, newest, source, row, slot, position,
        H, D, R, VALUE, VALUE_SCALES, GROUPS, SINK, RECENT, FP8,
    )  # fmt: skip


@triton.jit
def _append_side(
    new, static_scale, pool, scale_pool, exact, layer, heads, store_mask, newest, source, row, slot, position,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store the keys or the values of R heads.

    `store_mask` (R): mask of the heads to store. `newest` (R): mask of the heads that are also stored in the ring of recent
    tokens. `source`, `row`, `slot` (R): rows of `new`, of the pools and of the exact buffer.
    """
    # A byte of 4-bit codes holds channels d and d + D / 2, which are loaded as two tiles.
    PARTS: tl.constexpr = streams_of(DTYPE)
    W: tl.constexpr = D // PARTS
    n: tl.constexpr = GROUPS // PARTS if GROUPS > PARTS else 1
    s: tl.constexpr = W // n
    group = tl.arange(0, n)
    channel = (group[:, None] * s + tl.arange(0, s)[None, :])[None, :, :]
    inside = tl.broadcast_to(store_mask[:, None, None], (R, n, s))

    parts = ()
    for part in tl.static_range(PARTS):
        x, negative = _widen(tl.load(new + source[:, None, None] * D + part * W + channel, mask=inside, other=0))
        parts = parts + ((x, negative),)
        if SINK > 0:
            pointers = exact + (slot + position)[:, None, None] * D + part * W + channel
            tl.store(pointers, x.to(tl.float16), mask=inside & (position < SINK))
        if RECENT > 0:
            pointers = exact + (slot + SINK + position % RECENT)[:, None, None] * D + part * W + channel
            tl.store(pointers, x.to(tl.float16), mask=tl.broadcast_to(newest[:, None, None], (R, n, s)))

    pointers = pool + row[:, None, None] * W + channel
    if DTYPE == "nvfp4":
        scale_pointers = scale_pool + row[:, None] * GROUPS + group[None, :]
        stored = _quantize_blocks(parts, tl.load(static_scale + layer), scale_pointers, store_mask, R, n, FP8)
        stored = stored.to(pool.dtype.element_ty)
    elif static_scale is not None:
        scales = tl.load(static_scale + layer * SCALES + heads % SCALES)[:, None]
        stored = _encode(parts[0], scales, DTYPE, FP8).to(pool.dtype.element_ty)
    elif scale_pool is not None:
        scale_pointers = scale_pool + row[:, None] * GROUPS + group[None, :]
        stored = _quantize(parts, scale_pointers, store_mask, R, n, DTYPE, GROUPS, FP8).to(pool.dtype.element_ty)
    elif DTYPE == "bf16":
        stored = round_to_bfloat16(parts[0][0])
    else:
        stored = parts[0][0].to(tl.float16)
    tl.store(pointers, stored, mask=inside)


@triton.jit
def _quantize(
    parts,
    scale_pointers,
    inside,
    R: tl.constexpr,
    n: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Return the packed codes (R, n, s) int32 of the tiles `parts` (R, n, s), and store their scales.

    `scale_pointers` (R, n): addresses of the scales. `inside` (R): mask of the heads to store.
    """
    LIMIT: tl.constexpr = 448.0 if DTYPE == "fp8_e4m3" else 127.0 if DTYPE == "int8" else 7.0
    mask = tl.broadcast_to(inside[:, None], (R, n))
    if DTYPE != "int4":
        scales = _round_scale(_largest_magnitude(parts[0][0]), LIMIT)
        tl.store(scale_pointers, scales, mask=mask)
        codes = _encode(parts[0], scales.to(tl.float32), DTYPE, FP8)
    else:
        low, high = _largest_magnitude(parts[0][0]), _largest_magnitude(parts[1][0])
        if GROUPS == 1:
            low = tl.maximum(low, high)
            high = low
        low, high = _round_scale(low, LIMIT), _round_scale(high, LIMIT)
        tl.store(scale_pointers, low, mask=mask)
        if GROUPS > 1:
            tl.store(scale_pointers + n, high, mask=mask)
        codes = 16 * _encode(parts[1], high.to(tl.float32), DTYPE, FP8)
        codes += _encode(parts[0], low.to(tl.float32), DTYPE, FP8) + 8
    return codes


@triton.jit
def _quantize_blocks(parts, layer_scale, scale_pointers, inside, R: tl.constexpr, n: tl.constexpr, FP8: tl.constexpr):
    """Do the same as `_quantize` for nvfp4: return the codes and store the block scales, in units of `layer_scale`."""
    mask = tl.broadcast_to(inside[:, None], (R, n))
    codes = tl.zeros(parts[0][0].shape, tl.int32)
    for part in tl.static_range(2):
        x = parts[part][0]
        exact_scale = tl.math.div_rn(_largest_magnitude(x), tl.broadcast_to(6.0 * layer_scale, (R, n)))
        scales = _magnitude_e4m3(tl.maximum(exact_scale, SMALLEST_BLOCK_SCALE), FP8)
        tl.store(scale_pointers + part * n, scales.to(tl.uint8), mask=mask)
        unit = e4m3_to_float32(scales) * layer_scale
        steps = tl.math.div_rn(x, tl.broadcast_to(unit[:, :, None], x.shape))
        codes += encode_e2m1(tl.where(x == x, steps, 0.0)) << (4 * part)
    return codes


@triton.jit
def _widen(raw):
    """Return numbers as float32, and whether their sign bits are set, also for NaN."""
    if raw.dtype == tl.float32:
        bits = raw.to(tl.int32, bitcast=True)
        x = raw
    else:
        bits = raw.to(tl.int16, bitcast=True)
        # The interpreter has no bfloat16 arithmetic, and its conversion loses subnormals.
        shifted = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        x = shifted if raw.dtype == tl.bfloat16 else raw.to(tl.float32)
    return x, bits < 0


@triton.jit
def _largest_magnitude(x):
    """Return the largest magnitude (R, n) in every group, ignoring NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), 2)


@triton.jit
def _round_scale(largest, LIMIT: tl.constexpr):
    """Return the float16 scale that maps `largest` to the code LIMIT, within MIN_SCALE and MAX_SCALE."""
    exact = tl.math.div_rn(largest, LIMIT)
    return tl.minimum(tl.maximum(exact, MIN_SCALE), MAX_SCALE).to(tl.float16)


@triton.jit
def _encode(part, scales, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Return the codes (int32) of numbers (R, n, s) divided by scales (R, n): integers, or bits of E4M3. Codes saturate.

    `part`: the numbers, and whether their sign bit is set.
    """
    x, negative = part
    steps = tl.math.div_rn(x, tl.broadcast_to(scales[:, :, None], x.shape))
    if DTYPE == "fp8_e4m3":
        codes = tl.where(x == x, _magnitude_e4m3(steps, FP8), 0x7F) | tl.where(negative, 0x80, 0)
    else:
        LIMIT: tl.constexpr = 127.0 if DTYPE == "int8" else 7.0
        steps = tl.minimum(tl.maximum(tl.where(x == x, steps, 0.0), -LIMIT), LIMIT)
        # float32 numbers from 2^23 to 2^24 are integers, so this addition rounds, ties to even. 0x4B400000 is 1.5 * 2^23.
        codes = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return codes


@triton.jit
def _magnitude_e4m3(x, FP8: tl.constexpr):
    """Return the bits (int32) of the E4M3 nearest to |x|, ties to even, saturating at 448. x must not be NaN."""
    if FP8:
        nearest = tl.minimum(tl.abs(x), 448.0).to(tl.float8e4nv)
        return nearest.to(tl.uint8, bitcast=True).to(tl.int32)
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x43E00000)
    # Round at the third mantissa bit, ties to even; then subtract 127 - 7 from the exponent.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the unit in the last place of 2^14 as a float32.
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(bits < 0x3C800000, subnormal, normal)


@triton.jit
def round_to_bfloat16(x):
    """Round float32 to bfloat16, ties to even, by integer arithmetic, because the interpreter's conversion truncates."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
