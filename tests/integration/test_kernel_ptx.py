"""The GPU's code paths, run by an emulator: the inline PTX of the decode kernels, and the append's conversion to float8.

With the emulator, the kernels run in the interpreter as they are compiled for a GPU. bf16 has no inline PTX, but the
interpreter has no bf16 arithmetic either: the emulator rounds by integer arithmetic and multiplies in float32.
"""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, Case, differing, planned, poison, side
from ptx_emulator import cast_impl, create_dot, create_fp_to_fp, create_inline_asm
from triton.runtime.interpreter import InterpreterBuilder

from plugins.kv_attention import launch, reference
from plugins.kv_attention.kernels import variants
from plugins.kv_attention.kernels.codes import decode, decode_words
from plugins.kv_attention.kernels.nvfp4 import decode_blocks
from plugins.kv_attention.layout import CacheLayout

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU executes PTX itself: tests/integration/test_kernel_decode.py"),
    pytest.mark.filterwarnings(
        "ignore:invalid value encountered:RuntimeWarning", "ignore::DeprecationWarning:triton.runtime.interpreter"
    ),
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
    """words (2, 32, 16), scales (4, 32, 4), out (16, 32, 16)."""
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
    """Each byte of the words of two tokens takes every value, next to bytes of other values."""
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


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp8_e4m3 token", "int4 64"),
        ("int8 head", "fp8_e4m3 tensor"),
        ("fp16", "int8 token"),
        ("fp8_e4m3 tensor", "nvfp4 16"),
    ],
)
def test_the_kernels_as_compiled_attend_as_the_reference(
    key: str, value: str, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "compute_capability", lambda _: sm)
    case = Case(CacheLayout(2, 128, side(key), side(value), 2, 5), [130, 3], group=8, dtype=torch.float16)
    plan = planned(case.layout, case.tables["lengths"], programs=2)
    out = launch.decode_attention(
        case.layout, case.query, case.key_new, case.value_new, case.cache, plan=plan, scaling=0.1, **case.tables
    )
    expected = case.expected(0.1)
    assert (out.float() - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize(
    ("key", "value", "dtype", "tolerance"),
    [
        # The query and the weights have two terms each; a single term of 8 bits would cost 1e-3.
        ("bf16", "bf16", torch.float32, 1e-4),
        ("bf16", "int4 32", torch.float16, 2e-3),
        ("fp8_e4m3 token", "bf16", torch.bfloat16, 3e-3),
    ],
)
def test_bfloat16_as_a_gpu_computes_it_attends_as_the_reference(
    key: str, value: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "compute_capability", lambda _: 90)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    case = Case(CacheLayout(2, 128, side(key), side(value)), [130, 3], group=8, dtype=dtype)
    plan = planned(case.layout, case.tables["lengths"], programs=2)
    out = launch.decode_attention(
        case.layout, case.query, case.key_new, case.value_new, case.cache, plan=plan, scaling=0.1, **case.tables
    )
    expected = case.expected(0.1)
    assert (out.float() - expected).norm() < tolerance * expected.norm()


def test_the_append_stores_the_same_bits_where_the_hardware_converts_to_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float16, as keys with a static scale of 1 and as values with dynamic scales."""
    monkeypatch.setattr(launch, "compute_capability", lambda _: 90)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(variants, "APPEND_TILE", 1 << 13)
    layout = CacheLayout(64, 128, side("fp8_e4m3 tensor"), side("fp8_e4m3 token"))
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).reshape(8, 64, 128)
    cache = {name: poison(spec) for name, spec in layout.pools(8).items()} | {"key_scale": torch.ones(1)}
    expected = {name: tensor.clone() for name, tensor in cache.items()}
    tables = {"page_table": torch.arange(8).int()[:, None], "lengths": torch.full((8,), 9, dtype=torch.int32)}
    reference.append(layout, x, x, expected, **tables)
    launch.append(layout, x[None], x[None], {name: tensor[None] for name, tensor in cache.items()}, **tables)
    for name, tensor in expected.items():
        assert not differing(cache[name], tensor).any(), name
