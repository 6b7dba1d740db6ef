"""Keys and values of whole sequences in float16: the cached tokens dequantized from their pages, then the new tokens.

float16 also for bfloat16 models: a dequantized number keeps 11 bits instead of 8, and the cache holds no number beyond float16.

Shapes: B sequences, X new tokens in total, P columns of the page table, Z rows of the output, H KV heads, D head_dim, W
stored elements of a row, n groups of s channels that share a scale (in one stream of a packed row).
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.attend import HALF_MAX
from plugins.kv_attention.kernels.codes import decode, streams_of
from plugins.kv_attention.kernels.nvfp4 import NVFP4_GAIN, moved, value_e4m3

PAGE: tl.constexpr = tl.constexpr(64)
SUMMED: tl.constexpr = tl.constexpr(128)
"""Sequences whose lengths are read at once."""


@triton.jit(do_not_specialize=["table_width"])
def gather(
    key_new, value_new, key_pool, value_pool, key_scale, value_scale, value_block_scale, query_starts, page_table, lengths,
    table_width, keys, values, key_starts,
    H: tl.constexpr, D: tl.constexpr, KEY: tl.constexpr, KEY_SCALE: tl.constexpr, VALUE: tl.constexpr,
    VALUE_SCALE: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Write 64 tokens of one sequence and KV head. Grid (P + blocks of 64 new tokens, H, B).

    Sequences follow one another without gaps. Tensors that the layout lacks are None.

    Args:
        key_new, value_new: (X, H, D) float16 or bfloat16.
        key_pool, value_pool, key_scale, value_scale, value_block_scale: As in decode_partial.
        query_starts: (B + 1) int32, the first new token of every sequence, and X.
        page_table: (B, table_width) int32.
        lengths: (B) int32, tokens before the new ones.
        keys, values: Output (Z, H, D) float16. Rows after the last sequence are not written.
        key_starts: Output (B + 1) int32, the first row of every sequence, and the row after the last.
    """
    block = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    length = tl.load(lengths + b)
    before = 0
    for first in range(0, b, SUMMED):
        i = first + tl.arange(0, SUMMED)
        before += tl.sum(tl.load(lengths + i, mask=i < b, other=0), 0)
    row = before + start
    if (block == 0) & (h == 0):
        if b == 0:
            tl.store(key_starts, 0)
        tl.store(key_starts + b + 1, row + length + count)

    t = tl.arange(0, PAGE)
    if block < table_width:
        if block * PAGE < length:
            page = tl.load(page_table + b.to(tl.int64) * table_width + block)
            token = (page.to(tl.int64) * H + h) * PAGE + t
            out = ((row + block * PAGE + t).to(tl.int64) * H + h) * D
            inside = block * PAGE + t < length
            _dequantize(key_pool, key_scale, None, token, h, keys, out, inside, D, KEY, KEY_SCALE, 1, PTX, FP8)
            _dequantize(
                value_pool, value_scale, value_block_scale, token, h, values, out, inside,
                D, VALUE, VALUE_SCALE, GROUPS, PTX, FP8,
            )  # fmt: skip
    else:
        u = (block - table_width) * PAGE + t
        d = tl.arange(0, D)[None, :]
        source = ((start + u).to(tl.int64) * H + h)[:, None] * D + d
        target = ((row + length + u).to(tl.int64) * H + h)[:, None] * D + d
        inside = tl.broadcast_to((u < count)[:, None], (PAGE, D))
        tl.store(keys + target, tl.load(key_new + source, mask=inside, other=0.0).to(tl.float32).to(tl.float16), mask=inside)
        tl.store(
            values + target, tl.load(value_new + source, mask=inside, other=0.0).to(tl.float32).to(tl.float16), mask=inside
        )


@triton.jit
def _dequantize(
    pool, scale, block_scale, token, h, out, rows, inside,
    D: tl.constexpr, DTYPE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of one page and head.

    `token` (64): rows in `pool`. `rows` (64): offsets of the same tokens in `out`. `inside` (64): tokens to write.
    """
    PARTS: tl.constexpr = streams_of(DTYPE)
    W: tl.constexpr = D // PARTS
    n: tl.constexpr = GROUPS // PARTS if GROUPS > PARTS else 1
    s: tl.constexpr = W // n
    STEP: tl.constexpr = n if GROUPS > 1 else 0  # both halves of a packed row may share one scale
    group = tl.arange(0, n)
    channel = (group[:, None] * s + tl.arange(0, s)[None, :])[None, :, :]
    mask = tl.broadcast_to(inside[:, None, None], (PAGE, n, s))
    # The whole page is read: it is the sequence's own memory, even if its last rows hold no token.
    stored = tl.load(pool + token[:, None, None] * W + channel)
    for part in tl.static_range(PARTS):
        if DTYPE == "int4":
            wide = stored.to(tl.int32)
            x = ((wide & 15) - 8 if part == 0 else wide >> 4).to(tl.float32)
        elif DTYPE == "nvfp4":
            x = moved(stored.to(tl.int32) >> (4 * part)).to(tl.float32) * NVFP4_GAIN
        else:
            x = decode(stored, DTYPE, PTX, FP8).to(tl.float32)

        if SCALE == "tensor":
            x *= tl.load(scale)
        elif SCALE == "head":
            x *= tl.load(scale + h)
        elif SCALE == "block":
            scales = value_e4m3(tl.load(block_scale + token[:, None] * GROUPS + part * n + group[None, :]).to(tl.int32))
            x *= (scales * tl.load(scale))[:, :, None]
        elif SCALE != "none":
            x *= tl.load(scale + token[:, None] * GROUPS + part * STEP + group[None, :]).to(tl.float32)[:, :, None]

        # A code times a scale that was rounded up may exceed the largest float16. NaN stays NaN.
        x = tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))
        tl.store(out + rows[:, None, None] + part * W + channel, x.to(tl.float16), mask=mask)
