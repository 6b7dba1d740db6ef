"""The inline PTX that decodes codes, emulated for every byte, because Triton's interpreter cannot run it."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from helpers.kernels.cases import DEVICE
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from plugins.kv_attention.kernels.codes import decode, decode_words
from plugins.kv_attention.kernels.nvfp4 import decode_blocks

Register = npt.NDArray[Any]


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    pool = np.stack([(word >> np.uint32(8 * i)) & np.uint32(0xFF) for word in (a, b) for i in range(4)])
    out = np.zeros(pool.shape[1], np.uint32)
    for i in range(4):
        nibble = int(selector[0] >> 4 * i) & 15
        byte = pool[nibble & 7]
        if nibble & 8:  # replicate the byte's sign bit into all its bits
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= byte << np.uint32(8 * i)
    return out


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            terms = [word if row >> bit & 1 else ~word for word, bit in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _halves(operation: Callable[..., Register]) -> Callable[..., Register]:
    """Turn an operation on float64 into an operation on pairs of float16 that rounds once."""

    def apply(*words: Register) -> Register:
        return operation(*(word.view(np.float16).astype(np.float64) for word in words)).astype(np.float16).view(np.uint32)

    return apply


OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "add.f16x2": _halves(lambda a, b: a + b),
    "mul.f16x2": _halves(lambda a, b: a * b),
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": lambda a: a.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32),
}
SIZES = {"h": np.uint16, "r": np.uint32}


def create_inline_asm(
    _: object, asm: str, constraints: str, values: list[TensorHandle], types: list[tl.dtype], __: bool, pack: int
) -> SimpleNamespace:
    """Replace triton.runtime.interpreter.InterpreterBuilder.create_inline_asm."""
    shape = values[0].data.shape
    letters = [letter.strip() for letter in constraints.split(",")]
    outputs = sum(letter.startswith("=") for letter in letters)
    inputs: list[Register] = []
    for value in values:
        # Groups of `pack` neighbours share registers of up to four bytes.
        rows = np.ascontiguousarray(value.data).reshape(-1, pack).view(np.uint8)
        inputs += [np.ascontiguousarray(rows[:, i : i + 4]).view(np.uint32).ravel() for i in range(0, rows.shape[1], 4)]
    assert len(inputs) == len(letters) - outputs
    registers = {f"${outputs + number}": register for number, register in enumerate(inputs)}
    _run(asm, registers, len(inputs[0]))
    pending = iter([registers[f"${i}"].astype(SIZES[letters[i][1]]) for i in range(outputs)])
    results = []
    for dtype in types:
        element = np.dtype({tl.float16: np.float16, tl.int32: np.int32}[dtype.scalar])
        parts: list[Register] = [next(pending)]
        while sum(part.itemsize for part in parts) < element.itemsize * pack:
            parts.append(next(pending))
        rows = np.concatenate([part[:, None].view(np.uint8) for part in parts], axis=1)
        results.append(TensorHandle(np.ascontiguousarray(rows).view(element).reshape(shape), dtype.scalar))
    assert next(pending, None) is None
    return SimpleNamespace(get_result=results.__getitem__)


def _run(asm: str, registers: dict[str, Register], count: int) -> None:
    """Execute the statements of a block. Every register is an array of `count` elements."""

    def read(name: str) -> Register:
        return registers[name] if name in registers else np.full(count, int(name, 0), np.uint32)

    for statement in asm.strip().strip("{}").split(";"):
        name, _, operands_text = " ".join(statement.split()).partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", operands_text)
        if name == "mov.b32" and target.startswith("{"):
            low, high = target.strip("{} ").replace(" ", "").split(",")
            word = read(sources[0]).astype(np.uint32)
            registers[low], registers[high] = (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)
        else:
            registers[target] = OPERATIONS[name](*map(read, sources))


pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU executes PTX itself: test_kernel_attention.py"),
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
    factors = scales.view(torch.float8_e4m3fn).double().reshape(2, 2, 32, 4)  # (low or high, even or odd)
    factors = factors.repeat_interleave(4, -1)
    expected = (values * factors.permute(1, 2, 3, 0)[:, :, :, None] / 16384).permute(3, 4, 0, 1, 2).reshape(16, 32, 16)
    assert torch.equal(out.double(), expected)
