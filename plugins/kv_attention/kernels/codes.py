"""Exact decoding of the cache's codes to float16 inside a kernel, with few instructions.

Every function has two bodies, chosen by the constexpr PTX: packed inline assembly for the GPU, and plain arithmetic for
Triton's interpreter. Both give the same numbers. A byte becomes a float16 if the constant byte 0x64 is put above it: the
float16 with bits 0x6400 + n is 1024 + n for n < 1024. So one PRMT builds two numbers, and one subtraction removes the
offset.
"""

import triton
import triton.language as tl


def per_byte_assembly(declared, body, outputs):
    """Return inline assembly that runs `body` once for each of the four bytes of two words.

    In `body`, %0 to %3 are the `outputs` results of the byte. %pair and %signed are PRMT selectors that put this byte of both
    words into one register. With %pair, `body` must clear the other bits; %signed fills them with copies of the sign.
    """
    text = ""
    for byte in range(4):
        code = body.replace("%pair", f"0x{4 + byte}{4 + byte}{byte}{byte}")
        code = code.replace("%signed", f"0x{12 + byte:x}{4 + byte}{8 + byte:x}{byte}")
        for number in range(outputs):
            code = code.replace(f"%{number}", f"${byte * outputs + number}")
        text += code
    return tl.constexpr("{" + declared + text + "}")


INT4_WORDS = per_byte_assembly(
    """
    .reg .b32 pair, low, high, offset, shrink, mend;
    mov.b32 offset, 0xe408e408;
    mov.b32 shrink, 0x2c002c00;
    mov.b32 mend, 0xd480d480;""",
    """
    prmt.b32 pair, $16, $17, %pair;
    lop3.b32 low, pair, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 high, pair, 0x00f000f0, 0x64806480, 0x6a;
    add.f16x2 low, low, offset;
    fma.rn.f16x2 high, high, shrink, mend;
    mov.b32 {%0, %1}, low;
    mov.b32 {%2, %3}, high;""",
    outputs=4,
)
INT8_WORDS = per_byte_assembly(
    """
    .reg .b32 pair, offset;
    mov.b32 offset, 0xe480e480;""",
    """
    prmt.b32 pair, $8, $9, %pair;
    lop3.b32 pair, pair, 0x00ff00ff, 0x64806480, 0x6a;
    add.f16x2 pair, pair, offset;
    mov.b32 {%0, %1}, pair;""",
    outputs=2,
)
# Same arithmetic as decode_e4m3.
E4M3_WORDS = per_byte_assembly(
    """
    .reg .b32 pair, factor;
    mov.b32 factor, 0x5c005c00;""",
    """
    prmt.b32 pair, $8, $9, %signed;
    shl.b32 pair, pair, 7;
    and.b32 pair, pair, 0xbf80bf80;
    mul.f16x2 pair, pair, factor;
    mov.b32 {%0, %1}, pair;""",
    outputs=2,
)
E4M3_WORDS_BY_HARDWARE = tl.constexpr("""{
    .reg .b32 pairs;
    .reg .b16 first, second;
    prmt.b32 pairs, $8, $9, 0x5140;
    mov.b32 {first, second}, pairs;
    cvt.rn.f16x2.e4m3x2 pairs, first;
    mov.b32 {$0, $1}, pairs;
    cvt.rn.f16x2.e4m3x2 pairs, second;
    mov.b32 {$2, $3}, pairs;
    prmt.b32 pairs, $8, $9, 0x7362;
    mov.b32 {first, second}, pairs;
    cvt.rn.f16x2.e4m3x2 pairs, first;
    mov.b32 {$4, $5}, pairs;
    cvt.rn.f16x2.e4m3x2 pairs, second;
    mov.b32 {$6, $7}, pairs;
    }""")


@triton.constexpr_function
def streams_of(dtype):
    """Return the number of codes in a stored element: 2 for 4-bit formats, otherwise 1."""
    return 2 if dtype in ("int4", "nvfp4") else 1


@triton.jit
def decode_int8(x, PTX: tl.constexpr):
    """Decode int8 to float16."""
    if PTX:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 offset;
            xor.b32 offset, $2, 0x80808080;
            prmt.b32 $0, offset, 0x64646464, 0x4140;
            prmt.b32 $1, offset, 0x64646464, 0x4342;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
        decoded = wide - 1152.0
    else:
        decoded = x.to(tl.float16)
    return decoded


@triton.jit
def decode_e4m3(x, PTX: tl.constexpr, FP8: tl.constexpr):
    """Decode finite float8_e4m3fn, passed as uint8, to float16. FP8: the target converts float8 in hardware."""
    if PTX and FP8:
        decoded = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif PTX:
        # A float16 with the exponent and mantissa bits of an E4M3 is 2^-8 times the number, also for subnormals. PRMT with
        # selector + 8 sign-extends each byte, so that one shift moves all bits into place. The mask clears the copied sign
        # above the exponent, and the bits that come from the neighbouring byte.
        shifted = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $2, 0, 0x9180;
            prmt.b32 high, $2, 0, 0xb3a2;
            shl.b32 low, low, 7;
            shl.b32 high, high, 7;
            and.b32 $0, low, 0xbf80bf80;
            and.b32 $1, high, 0xbf80bf80;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
        decoded = shifted * 256.0
    else:
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        decoded = bits.to(tl.float16, bitcast=True) * 256.0
    return decoded


@triton.jit
def decode(x, DTYPE: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr):
    """Decode a tile of 8 or 16 bits per element to the type of the matrix product.

    The type is float16, or bfloat16 for bf16 (float32 in the interpreter, which has no bfloat16 arithmetic).
    """
    if DTYPE == "fp8_e4m3":
        decoded = decode_e4m3(x, PTX, FP8)
    elif DTYPE == "int8":
        decoded = decode_int8(x, PTX)
    elif DTYPE == "bf16" and not PTX:
        decoded = x.to(tl.float32)
    else:
        decoded = x
    return decoded


@triton.jit
def decode_words(even, odd, DTYPE: tl.constexpr, PTX: tl.constexpr, FP8: tl.constexpr):
    """Decode words of four bytes of an even token and of the next, odd token.

    A matrix product needs two neighbouring tokens of a channel in one register, but memory holds four channels of a token
    in one word. PRMT joins the bytes of two tokens before they are widened; no other transposition is needed.

    Returns:
        float16 codes: for each byte a pair (even, odd); for int4, for each byte a pair of low bits and a pair of high bits.
    """
    if PTX and DTYPE == "int4":
        codes = tl.inline_asm_elementwise(
            INT4_WORDS, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], (tl.float16,) * 16, True, 1
        )
    elif PTX:
        if DTYPE == "int8":
            WORDS: tl.constexpr = INT8_WORDS
        elif FP8:
            WORDS: tl.constexpr = E4M3_WORDS_BY_HARDWARE
        else:
            WORDS: tl.constexpr = E4M3_WORDS
        codes = tl.inline_asm_elementwise(WORDS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], (tl.float16,) * 8, True, 1)
    else:
        codes = ()
        for j in tl.static_range(4):
            if DTYPE == "int4":
                low_even = ((even >> (8 * j)) & 15) - 8
                low_odd = ((odd >> (8 * j)) & 15) - 8
                high_even = (even << (24 - 8 * j)) >> 28
                high_odd = (odd << (24 - 8 * j)) >> 28
                codes = codes + (
                    low_even.to(tl.float16), low_odd.to(tl.float16), high_even.to(tl.float16), high_odd.to(tl.float16)
                )  # fmt: skip
            else:
                byte_even = (even << (24 - 8 * j)) >> 24
                byte_odd = (odd << (24 - 8 * j)) >> 24
                if DTYPE == "int8":
                    codes = codes + (byte_even.to(tl.float16), byte_odd.to(tl.float16))
                else:
                    codes = codes + (
                        decode_e4m3(byte_even.to(tl.uint8), PTX, FP8), decode_e4m3(byte_odd.to(tl.uint8), PTX, FP8)
                    )  # fmt: skip
    return codes
