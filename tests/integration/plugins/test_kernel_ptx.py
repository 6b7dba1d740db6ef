"""The inline PTX of the decode kernels, emulated for every byte. Triton's interpreter runs plain arithmetic instead."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE
from ptx_emulator import create_inline_asm
from triton.runtime.interpreter import InterpreterBuilder

from plugins.kv_attention.kernels.codes import decode, decode_words
from plugins.kv_attention.kernels.nvfp4 import decode_blocks

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU executes PTX itself: tests/integration/plugins/test_kernel_decode.py"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _decode_bytes(codes: Any, out: Any, DTYPE: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    tl.store(out + i, decode(tl.load(codes + i), DTYPE, True, False))


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _decode_words(words: Any, out: Any, DTYPE: tl.constexpr, FP8: tl.constexpr, COUNT: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    codes = decode_words(tl.load(words + i), tl.load(words + 256 + i), DTYPE, True, FP8)
    for n in tl.static_range(COUNT):
        tl.store(out + n * 256 + i, codes[n])


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _decode_blocks(words: Any, scales: Any, out: Any, PTX: tl.constexpr, FP8: tl.constexpr) -> None:
    """Decode words (2, 32, 16) with scales (4, 32, 4) into out (16, 32, 16)."""
    k = tl.arange(0, 32)[:, None]
    word, block = k * 16 + tl.arange(0, 16)[None, :], k * 4 + tl.arange(0, 4)[None, :]
    low_even, low_odd = tl.load(scales + block), tl.load(scales + 128 + block)
    high_even, high_odd = tl.load(scales + 256 + block), tl.load(scales + 384 + block)
    stored = (tl.load(words + word), tl.load(words + 512 + word), low_even, low_odd, high_even, high_odd)
    codes = decode_blocks(stored, 64, 64, PTX, FP8)
    for n in tl.static_range(16):
        tl.store(out + n * 512 + word, codes[n])


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_every_byte_is_decoded_as_by_torch(dtype: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    out = torch.full((256,), torch.nan, dtype=torch.float16)
    _decode_bytes[(1,)](codes if dtype == "fp8_e4m3" else codes.view(torch.int8), out, dtype)
    expected = codes.view(torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.int8).half()
    finite = expected.isfinite()
    assert finite.sum() >= 254
    assert torch.equal(out[finite], expected[finite])


@pytest.mark.parametrize(("dtype", "fp8"), [("int4", False), ("int8", False), ("fp8_e4m3", False), ("fp8_e4m3", True)])
def test_every_byte_of_a_word_is_decoded_as_by_torch(dtype: str, fp8: bool) -> None:
    """Each byte of the words of two tokens takes every value, next to bytes with other values."""
    numbers = torch.arange(256)
    words = torch.stack([(numbers * step + shift) % 256 for step, shift in ((1, 0), (3, 7), (5, 1), (7, 9))], -1)
    pairs = torch.stack([words, words.flip(0)]).to(torch.uint8)
    count = 16 if dtype == "int4" else 8
    out = torch.full((count, 256), torch.nan, dtype=torch.float16)
    _decode_words[(1,)](pairs.view(torch.int32), out, dtype, fp8, count)
    if dtype == "int4":
        signed = pairs.view(torch.int8)
        expected = torch.cat([(signed & 15) - 8, signed >> 4])
    else:
        expected = pairs.view(torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.int8)
    expected = expected.half().reshape(-1, 256, 4).permute(2, 0, 1).reshape(count, 256)
    finite = expected.isfinite()
    assert finite.float().mean() > 0.98
    assert torch.equal(out[finite], expected[finite])


@pytest.mark.parametrize(("ptx", "fp8"), [(False, False), (True, False), (True, True)])
def test_every_code_of_nvfp4_times_every_scale_is_exact(ptx: bool, fp8: bool) -> None:
    """Products of a code and its block's scale, over 2^14, are float16 without rounding."""
    words = torch.randint(0, 256, (2, 32, 16, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = torch.stack([(torch.arange(128) * step % 127).to(torch.uint8).reshape(32, 4) for step in (1, 3, 5, 7)])
    out = torch.full((16, 32, 16), torch.nan, dtype=torch.float16)
    _decode_blocks[(1,)](words.view(torch.int32), scales, out, ptx, fp8)
    codes = torch.stack([words & 15, words >> 4], -1)  # (even or odd, 32, word, byte, low or high)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.where(codes >= 8, -1.0, 1.0).double() * numbers[(codes % 8).long()]
    factors = (
        scales.view(torch.float8_e4m3fn).double().reshape(2, 2, 32, 4).repeat_interleave(4, -1)
    )  # (low or high, even or odd)
    expected = (values * factors.permute(1, 2, 3, 0)[:, :, :, None] / 16384).permute(3, 4, 0, 1, 2).reshape(16, 32, 16)
    assert torch.equal(out.double(), expected)
