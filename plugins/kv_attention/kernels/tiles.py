"""Loads of the cache's tiles, and decoding of value tiles.

Shapes: T tokens of a tile, D head_dim, W stored elements of a value row, C channels of a chunk of a stream. A value row is one
stream of channels; int4 and nvfp4 have two, the channels of the low and of the high bits.
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.codes import decode, decode_words, streams_of
from plugins.kv_attention.kernels.nvfp4 import decode_blocks


@triton.jit
def load_rows(pointers, visible, ROWS: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile (ROWS, LAST). MASKED: return zeros for rows that are not `visible` (ROWS)."""
    if MASKED:
        tile = tl.load(pointers, mask=tl.broadcast_to(visible[:, None], (ROWS, LAST)), other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_scales(scales, block, visible, T: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr):
    """Load the float16 scales of a tile's tokens, GROUPS each, as a tuple of float32 (T). MASKED: as in load_rows.

    Unmasked tiles are read in words of two scales, the narrowest load that Triton makes asynchronous.
    """
    loaded = ()
    if MASKED:
        pointers = scales + block * (T * GROUPS) + tl.arange(0, T) * GROUPS
        for g in tl.static_range(GROUPS):
            loaded = loaded + (tl.load(pointers + g, mask=visible, other=0.0).to(tl.float32),)
    else:
        # The cast drops the alignment that Triton knows of the pointer.
        words = tl.multiple_of(scales.to(tl.pointer_type(tl.int32)), 16) + block * (T * GROUPS // 2)
        if GROUPS == 1:
            even, odd = _unpack_halves(tl.load(words + tl.arange(0, T // 2)))
            loaded = (tl.interleave(even, odd),)
        else:
            W: tl.constexpr = GROUPS // 2
            tile = tl.load(words + (tl.arange(0, T)[:, None] * W + tl.arange(0, W)[None, :]))
            columns = _split_columns(tile, T, W, W)
            for w in tl.static_range(W):
                loaded = loaded + _unpack_halves(tl.reshape(columns[w], (T,)))
    return loaded


@triton.jit
def _unpack_halves(words):
    """Return the float16 numbers in the low and in the high half of every word, as float32."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_values(
    values, block, visible, T: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr
):
    """Load the values of a tile in chunks: (T, C), or words of four bytes of the even and of the odd tokens.

    Rows are loaded first and then cut into chunks, because a chunk may have less than 16 bytes per thread.
    """
    W: tl.constexpr = D // streams_of(VALUE)
    if VALUE == "fp16" or VALUE == "bf16":
        t = tl.arange(0, T)
        tile = load_rows(values + block * (T * W) + (t[:, None] * W + tl.arange(0, W)[None, :]), visible, T, W, MASKED)
        stored = ((tile,),)
    else:
        k = tl.arange(0, T // 2)
        # The cast drops the alignment that Triton knows of the pointer.
        words = tl.multiple_of(values.to(tl.pointer_type(tl.int32)), 16) + block * (T * W // 4)
        offsets = k[:, None] * (W // 2) + tl.arange(0, W // 4)[None, :]
        if MASKED:
            visible_even, visible_odd = tl.split(tl.reshape(visible, (T // 2, 2)))
        else:
            visible_even = None
            visible_odd = None
        even = _split_columns(load_rows(words + offsets, visible_even, T // 2, W // 4, MASKED), T // 2, W // 4, CHUNKS)
        odd = _split_columns(load_rows(words + W // 4 + offsets, visible_odd, T // 2, W // 4, MASKED), T // 2, W // 4, CHUNKS)
        stored = ()
        for c in tl.static_range(CHUNKS):
            stored = stored + ((even[c], odd[c]),)
    return stored


@triton.jit
def append_block_scales(
    stored, scales, block, visible, T: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr
):
    """Append to each nvfp4 chunk from load_values its block scales: bytes of E4M3 (T / 2, C / 16), one per block.

    Four tensors are appended: first the scales of the low bits' channels for even tokens and for odd tokens, then the scales of
    the high bits' channels likewise.
    """
    G: tl.constexpr = D // 16
    even = scales + block * (T * G) + (tl.arange(0, T // 2)[:, None] * (2 * G) + tl.arange(0, G)[None, :])
    if MASKED:
        visible_even, visible_odd = tl.split(tl.reshape(visible, (T // 2, 2)))
    else:
        visible_even = None
        visible_odd = None
    evens = _split_columns(load_rows(even, visible_even, T // 2, G, MASKED), T // 2, G, 2 * CHUNKS)
    odds = _split_columns(load_rows(even + G, visible_odd, T // 2, G, MASKED), T // 2, G, 2 * CHUNKS)
    chunks = ()
    for c in tl.static_range(CHUNKS):
        chunks = chunks + (stored[c] + (evens[c], odds[c], evens[CHUNKS + c], odds[CHUNKS + c]),)
    return chunks


@triton.jit
def _split_columns(tile, ROWS: tl.constexpr, LAST: tl.constexpr, CHUNKS: tl.constexpr):
    """Cut a tile (ROWS, LAST) into its 1, 2 or 4 chunks of columns."""
    if CHUNKS == 1:
        chunks = (tile,)
    else:
        lower, upper = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, LAST // 2)), (0, 2, 1)))
        chunks = _split_columns(lower, ROWS, LAST // 2, CHUNKS // 2) + _split_columns(upper, ROWS, LAST // 2, CHUNKS // 2)
    return chunks


@triton.jit
def decode_values(stored, T: tl.constexpr, C: tl.constexpr, VALUE: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr):
    """Decode a chunk from load_values to its streams (T, C), with columns in the order of `channel_order`.

    Streams of nvfp4 are codes times block scales, divided by NVFP4_GAIN.
    """
    STREAMS: tl.constexpr = streams_of(VALUE)
    if VALUE == "fp16" or VALUE == "bf16":
        streams = (decode(stored[0], VALUE, PTX, FP8),)
    else:
        if VALUE == "nvfp4":
            codes = decode_blocks(stored, T, C, PTX, FP8)
        else:
            codes = decode_words(stored[0], stored[1], VALUE, PTX, FP8)
        streams = ()
        for s in tl.static_range(STREAMS):
            streams = streams + (
                _interleave(
                    codes[2 * s], codes[2 * s + 1],
                    codes[2 * STREAMS + 2 * s], codes[2 * STREAMS + 2 * s + 1],
                    codes[4 * STREAMS + 2 * s], codes[4 * STREAMS + 2 * s + 1],
                    codes[6 * STREAMS + 2 * s], codes[6 * STREAMS + 2 * s + 1],
                    T, C,
                ),
            )  # fmt: skip
    return streams


@triton.jit
def _interleave(e0, o0, e1, o1, e2, o2, e3, o3, T: tl.constexpr, C: tl.constexpr):
    """Interleave bytes 0 to 3 of words (T / 2, C / 4) of even and odd tokens to (T, C), in the order of `channel_order`."""
    lower = tl.join(tl.join(e0, o0), tl.join(e1, o1))
    upper = tl.join(tl.join(e2, o2), tl.join(e3, o3))
    tile = tl.reshape(tl.join(lower, upper), (T // 2, C // 32, 8, 2, 2, 2))
    return tl.reshape(tl.permute(tile, (0, 3, 5, 1, 4, 2)), (T, C))


@triton.jit
def channel_order(VALUE: tl.constexpr, C: tl.constexpr):
    """Return the channel of each row (C) of the sums.

    The order is byte 0 of eight words, byte 1 of the same words, and so on for all words, then bytes 2 and 3 likewise. So the
    16 rows of a matrix instruction, two per thread, come from eight words.
    """
    c = tl.arange(0, C)
    if VALUE == "fp16" or VALUE == "bf16":
        channel = c
    else:
        word = (c // 16) % (C // 32) * 8 + c % 8
        channel = word * 4 + c // (C // 2) * 2 + c // 8 % 2
    return channel


@triton.jit
def sort_by_channel(rows, N: tl.constexpr, VALUE: tl.constexpr, C: tl.constexpr):
    """Sort rows (C, N) from the order of `channel_order` by channel. A thread then stores 16 bytes at a time."""
    if VALUE != "fp16" and VALUE != "bf16":
        rows = tl.reshape(tl.permute(tl.reshape(rows, (2, C // 32, 2, 8, N)), (1, 3, 0, 2, 4)), (C, N))
    return rows
