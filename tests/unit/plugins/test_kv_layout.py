"""The page format: allowed layouts, bytes, packing, and the kernels' reference over pages.

Legend: B sequences, H KV heads, G query heads per KV head, T tokens, D head_dim.
"""

import math
from itertools import product
from math import prod
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import attention_reference as reference
from plugins.kv_attention import layout as page_format
from plugins.kv_attention.layout import HEAD_DIMS, KEY_DTYPES, PAGE_TOKENS, CacheLayout, Dtype, SideLayout
from stages.engines.reference.formats import dequantize as reference_dequantize
from stages.engines.reference.formats import quantize as reference_quantize
from stages.policies.arithmetic_torch import Static
from stages.policies.policy import PAGE_TOKENS as POLICY_PAGE_TOKENS
from stages.policies.table import CODES

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "float32": 4}
SIDES = [
    SideLayout(dtype, granularity, size)
    for dtype in get_args(Dtype)
    for granularity in page_format.CODES[dtype].granularities
    for size in (page_format.CODES[dtype].group_sizes if granularity == "per_group" else (None,))
]
FP8_TOKEN = SideLayout("fp8_e4m3", "per_token")
INT4_G64, BF16 = SideLayout("int4", "per_group", 64), SideLayout("bf16")
NVFP4 = SideLayout("nvfp4", "per_group", 16)


def every_layout() -> list[CacheLayout]:
    """Return layouts with every pair of formats at every head_dim."""
    fitting = [(key, value, dim) for key, value, dim in product(SIDES, SIDES, HEAD_DIMS) if dim % (value.group_size or 1) == 0]
    return [CacheLayout(3, dim, key, value, 4, 5) for key, value, dim in fitting if key.dtype in KEY_DTYPES]


def test_pools_have_the_bytes_of_token_bytes_in_rows_of_16_bytes() -> None:
    layouts = every_layout()
    assert len(layouts) > 150
    for layout in layouts:
        pool_bytes = sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.pools(7).values())
        assert pool_bytes == 7 * PAGE_TOKENS * layout.token_bytes, layout
        for name in ("key_pool", "value_pool"):
            dtype, shape = layout.pools(1)[name]
            assert ITEM_BYTES[dtype] * shape[-1] % 16 == 0, "a row of codes begins at 16 bytes"
        exact = sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.exact_buffers(2).values())
        assert exact == 2 * (2 * 3 * (4 + 5) * layout.head_dim * 2), layout


def test_constants_and_bytes_are_those_of_the_policies() -> None:
    assert PAGE_TOKENS == POLICY_PAGE_TOKENS
    assert CODES["nvfp4"].block == page_format.NVFP4_GROUP
    for side in SIDES:
        form = reference.format_of(side)
        for dim in HEAD_DIMS:
            if form.refuse_head_dim(dim) is None:
                assert side.token_bytes(dim) == form.token_bytes(dim)
                assert side.groups(dim) == form.scales_per_token(dim)
        assert side.exact == form.exact
        assert (side.static, side.has_static_scales) == (form.static, form.has_static_scales)
        assert (side.codes.limit, side.codes.storage, side.codes.scale_storage) == (
            form.code.limit,
            form.code.storage.torch,
            form.code.scale_storage.torch,
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 96}, "head_dim must be one of 64, 128, 256, got 96"),
        ({"key": SideLayout("int4", "per_token")}, "key dtype must be one of fp16, bf16, fp8_e4m3, int8, got int4"),
        ({"head_dim": 64, "value": SideLayout("int4", "per_group", 128)}, "group_size must divide head_dim 64, got 128"),
        ({"key": NVFP4}, "key dtype must be one of fp16, bf16, fp8_e4m3, int8, got nvfp4"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"recent_tokens": -64}, "recent_tokens must be at least 0, got -64"),
    ],
)
def test_a_cache_that_no_kernel_reads_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "key": FP8_TOKEN, "value": INT4_G64}
    with pytest.raises(ValueError, match=message):
        CacheLayout(**arguments | changed)


NAN, INF = math.nan, math.inf


def test_nan_has_no_part_in_a_scale_and_infinity_saturates_it() -> None:
    side = SideLayout("int4", "per_group", 32)
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([NAN, 7.0, -3.5])
    x[0, 32:34] = torch.tensor([INF, 70000.0])
    x[0, 64:96] = NAN
    codes, scales = reference.quantize(x, side)
    assert scales is not None
    assert scales.tolist() == [[1.0, 65504.0, 2.0**-14, 2.0**-14]]
    expected = np.zeros((1, 128), np.int8)
    expected[0, [1, 2, 32, 33]] = [7, -4, 7, 1]
    low, high = np.split(expected, 2, axis=-1)
    assert np.array_equal(codes.numpy(), 16 * high + low + 8)


class History:
    """Tokens appended individually to sequences with shuffled pages, and the keys and values that a query must read."""

    def __init__(self, layout: CacheLayout, lengths: list[int], seed: int) -> None:
        self.layout = layout
        self.rng = torch.Generator().manual_seed(seed)
        batch, columns = len(lengths), -(-max([*lengths, 1]) // PAGE_TOKENS)
        stored = layout.pools(batch * columns + 2) | layout.exact_buffers(batch + 1)
        self.cache = {
            name: torch.full(shape, -1, dtype=torch.int8).to(getattr(torch, dtype)) for name, (dtype, shape) in stored.items()
        }
        self.cache |= {name: self.random(shape).abs() * 0.01 for name, (_, shape) in layout.static_scales().items()}
        order = torch.randperm(batch * columns + 2, generator=self.rng)[: batch * columns]
        self.tables = {
            "page_table": order.reshape(batch, columns).int(),
            "lengths": torch.zeros(batch, dtype=torch.int32),
            "exact_slots": torch.randperm(batch + 1, generator=self.rng)[:batch].int(),
        }
        self.tokens_BHTD = [self.random((2, layout.kv_heads, length, layout.head_dim)) for length in lengths]
        for position in range(max(lengths)):
            rows = [b for b, length in enumerate(lengths) if position < length]
            key, value = (torch.stack([self.tokens_BHTD[b][i][:, position] for b in rows]) for i in range(2))
            reference.append(layout, key, value, self.cache, **{name: table[rows] for name, table in self.tables.items()})
            self.tables["lengths"][rows] += 1

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def expected(self, b: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (H, T, D) rounded like in the reference engine; sinks and recent tokens in float16."""
        sides = []
        for i, (name, side) in enumerate((("key", self.layout.key), ("value", self.layout.value))):
            x_HTD = self.tokens_BHTD[b][i]
            scale = self.cache.get(f"{name}_scale")
            static = None if scale is None else Static(scale.view(-1, 1, 1), None)
            form = reference.format_of(side)
            rounded = reference_dequantize(reference_quantize(x_HTD, form, static), form, static)
            length = x_HTD.shape[1]
            position = torch.arange(length)
            exact = (position < self.layout.sink_tokens) | (position >= length - self.layout.recent_tokens)
            sides.append(torch.where(exact[:, None], x_HTD.half().float(), rounded))
        return sides[0], sides[1]


LAYOUTS = [
    CacheLayout(2, 64, SideLayout("fp8_e4m3", "per_token"), SideLayout("int4", "per_group", 32)),
    CacheLayout(1, 128, SideLayout("int8", "per_head"), SideLayout("int4", "per_token"), 4, 64),
    CacheLayout(3, 64, SideLayout("bf16"), SideLayout("fp8_e4m3", "per_tensor"), 0, 5),
    CacheLayout(2, 64, SideLayout("fp8_e4m3", "per_head"), SideLayout("int8", "per_token"), 70, 0),
    CacheLayout(2, 128, SideLayout("fp8_e4m3", "per_tensor"), SideLayout("nvfp4", "per_group", 16), 3, 5),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.key.dtype}-{layout.value.dtype}")
def test_attention_is_torchs_own_over_what_was_appended(layout: CacheLayout) -> None:
    lengths = [0, 1, 67, 130]
    history = History(layout, lengths, seed=len(layout.key.dtype))
    batch, heads, dim = len(lengths), layout.kv_heads, layout.head_dim
    query = history.random((batch, 3 * heads, dim))
    key_new, value_new = (history.random((batch, heads, dim)) for _ in range(2))
    out = reference.attend(layout, query, key_new, value_new, history.cache, scaling=0.2, **history.tables)
    for b in range(batch):
        key, value = (
            torch.cat([cached, new[b, :, None]], 1)
            for cached, new in zip(history.expected(b), (key_new, value_new), strict=True)
        )
        expected = functional.scaled_dot_product_attention(
            query[b, :, None][None], key[None], value[None], scale=0.2, enable_gqa=True
        )
        torch.testing.assert_close(out[b], expected[0, :, 0], rtol=1e-5, atol=1e-5)
