"""Conversion of NVFP4 inside a kernel: 4-bit E2M1 codes and E4M3 block scales to numbers, and back.

A code becomes a float16 if its three exponent and mantissa bits are moved to the lowest exponent bits and the highest
mantissa bit: that float16 is 2^-14 times the code, also for subnormals. Its product with the block's scale is a multiple of
2^-24 of at most six bits, which float16 holds without rounding. Every function has two bodies that give the same numbers, like
those in codes.py: packed inline assembly and plain arithmetic.
"""

import triton
import triton.language as tl

from plugins.kv_attention.kernels.codes import decode_e4m3, per_byte_assembly

NVFP4_GAIN = tl.constexpr(16384.0)
"""2^14: the factor that decoded numbers lack, in addition to the layer's scale."""


SCALED_WORDS = per_byte_assembly(
    """
    .reg .b32 pair, low, high, sign;""",
    """
    prmt.b32 pair, $16, $17, %pair;
    shl.b32 low, pair, 1;
    shl.b32 sign, pair, 4;
    shr.u32 high, pair, 3;
    and.b32 low, low, 0x0e000e00;
    and.b32 high, high, 0x0e000e00;
    lop3.b32 low, low, sign, 0x80008000, 0xf8;
    lop3.b32 high, high, pair, 0x80008000, 0xf8;
    mul.f16x2 low, low, $18;
    mul.f16x2 high, high, $19;
    mov.b32 {%0, %1}, low;
    mov.b32 {%2, %3}, high;""",
    outputs=4,
)


# Same arithmetic as decode_e4m3.
SCALES = tl.constexpr("""{
    .reg .b32 pair, factor;
    mov.b32 factor, 0x5c005c00;
    prmt.b32 pair, $1, $2, 0x4505;
    shr.u32 pair, pair, 1;
    mul.f16x2 $0, pair, factor;
    }""")
SCALES_BY_HARDWARE = tl.constexpr("""{
    .reg .b32 pair;
    .reg .b16 bytes, rest;
    prmt.b32 pair, $1, $2, 0x5140;
    mov.b32 {bytes, rest}, pair;
    cvt.rn.f16x2.e4m3x2 $0, bytes;
    }""")


@triton.jit
def decode_blocks(stored, T: tl.constexpr, C: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr):
    """Decode words (T / 2, C / 4) of four bytes of an even and of the odd token, times their blocks' scales.

    Returns:
        As decode_words of int4: for each byte a pair (even, odd) for the low bits and a pair for the high bits, divided by
        NVFP4_GAIN.
    """
    even, odd, low_even, low_odd, high_even, high_odd = stored
    if PTX:
        low_scale = _repeat_for_words(_scale_pairs(low_even, low_odd, FP8), T, C)
        high_scale = _repeat_for_words(_scale_pairs(high_even, high_odd, FP8), T, C)
        codes = _scaled_pairs(even, odd, low_scale, high_scale)
    else:
        low_even, low_odd = _scale(low_even, T, C), _scale(low_odd, T, C)
        high_even, high_odd = _scale(high_even, T, C), _scale(high_odd, T, C)
        codes = ()
        for j in tl.static_range(4):
            codes = codes + (
                decode_e2m1(even >> (8 * j)) * low_even, decode_e2m1(odd >> (8 * j)) * low_odd,
                decode_e2m1(even >> (8 * j + 4)) * high_even, decode_e2m1(odd >> (8 * j + 4)) * high_odd,
            )  # fmt: skip
    return codes


@triton.jit
def _repeat_for_words(blocks, T: tl.constexpr, C: tl.constexpr):
    """Repeat the values of blocks (T / 2, C / 16) for each of their four words: (T / 2, C / 4).

    Uses only views, so that Triton loads values and scales in the layout that the matrix product needs.
    """
    repeated = tl.broadcast_to(tl.reshape(blocks, (T // 2, C // 16, 1)), (T // 2, C // 16, 4))
    return tl.reshape(repeated, (T // 2, C // 4))


@triton.jit
def _scale(bytes_, T: tl.constexpr, C: tl.constexpr):
    return _repeat_for_words(decode_e4m3(bytes_, False, False), T, C)


@triton.jit
def _scale_pairs(even, odd, FP8: tl.constexpr):
    """Decode bytes of positive E4M3 to pairs of float16 (even, odd), as int32. FP8: the target converts float8 in hardware."""
    if FP8:
        PAIRS: tl.constexpr = SCALES_BY_HARDWARE
    else:
        PAIRS: tl.constexpr = SCALES
    return tl.inline_asm_elementwise(PAIRS, "=r,r,r", [even.to(tl.int32), odd.to(tl.int32)], tl.int32, True, 1)


@triton.jit
def _scaled_pairs(even, odd, low_scale, high_scale):
    """Decode the four bytes of words of an even and an odd token, and multiply by pairs of scales."""
    return tl.inline_asm_elementwise(
        SCALED_WORDS,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
        [even, odd, low_scale, high_scale],
        (tl.float16,) * 16,
        True,
        1,
    )


@triton.jit
def decode_e2m1(code):
    """Return 2^-14 times the E2M1 number in the lowest four bits of int32, as float16."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_to_float32(codes):
    """Convert bits (int32) of positive E4M3 numbers to float32. Avoids float32 subnormals, which a GPU may flush to 0."""
    normal = ((codes + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)


@triton.jit
def encode_e2m1(steps):
    """Return the nearest codes 0 to 15 (int32) of numbers divided by their scale: ties to even codes, saturating."""
    magnitude = tl.minimum(tl.abs(steps), 6.0)
    # Codes 0 to 4 have steps of 0.5 (up to 2), codes 4 to 6 steps of 1 (up to 4), and codes 6 and 7 a step of 2.
    units = tl.where(magnitude < 2.0, magnitude * 2.0, tl.where(magnitude < 4.0, magnitude, magnitude * 0.5))
    above = tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    # The addition rounds, ties to even: see _encode of append.py.
    rounded = (units + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return rounded + above + tl.where(steps < 0.0, 8, 0)
