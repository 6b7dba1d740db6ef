"""The plugin's reference compared with the reference engine's format arithmetic and torch's own attention.

Legend: B sequences, H KV heads, G query heads per KV head, T tokens, D head_dim.
"""

import math

import numpy as np
import pytest
import torch
from format_cases import tensors
from hypothesis import example, given, settings
from test_kv_layout import SIDES, policy_format
from torch import Tensor
from torch.nn import functional

from plugins.kv_attention import reference
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout, SideLayout
from stages.engines.reference.formats import dequantize as reference_dequantize
from stages.engines.reference.formats import quantize as reference_quantize
from stages.policies.arithmetic_torch import Static

examples = settings(max_examples=40, derandomize=True, deadline=None)

NAN, INF = math.nan, math.inf


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def static_scale(side: SideLayout, x_HTD: Tensor) -> Tensor | None:
    """Return scales (1) or (H) such that a few numbers saturate."""
    if not side.has_static_scales:
        return None
    largest = x_HTD.abs().amax((1, 2)).clamp(min=1e-20) * 0.7 / (side.codes.limit * (448.0 if side.layer_scale else 1.0))
    return largest if side.granularity == "per_head" else largest.amax()[None]


@examples
@example(x_HTD=torch.zeros(1, 1, 64))
@example(x_HTD=torch.arange(-64.0, 64.0).reshape(1, 2, 64) * 0.5)
@given(x_HTD=tensors())
def test_every_format_stores_the_bits_that_the_reference_stores(x_HTD: Tensor) -> None:
    for side in SIDES:
        if x_HTD.shape[-1] % (side.group_size or 1):
            continue
        scale = static_scale(side, x_HTD)
        codes_THW, scales = reference.quantize(x_HTD.transpose(0, 1), side, scale)
        static = None if scale is None else Static(scale.view(-1, 1, 1), None)
        expected = reference_quantize(x_HTD, policy_format(side), static)
        assert same_bits(codes_THW.transpose(0, 1).contiguous(), expected.codes.contiguous()), side
        assert (scales is None) == (expected.scale is None), side
        if scales is not None and expected.scale is not None:
            assert same_bits(scales.transpose(0, 1).contiguous(), expected.scale.contiguous()), side


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
            form = policy_format(side)
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
