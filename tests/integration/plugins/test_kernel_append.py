"""The append kernel against the reference, bit for bit: on a GPU, or in Triton's interpreter without one.

Whole pools are compared, so writes beyond the new token fail too. Legend: L layers, B sequences, H KV heads, D head_dim, P
columns of the page table, T tokens.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels.cases import DEVICE, DTYPES, KEYS, NO_PAGE, VALUES, differs, on_device, poison, side
from torch import Tensor

from benchmarks import attention_reference as reference
from plugins.kv_attention import launch, variants
from plugins.kv_attention.layout import HEAD_DIMS, PAGE_TOKENS, CacheLayout

pytestmark = pytest.mark.filterwarnings(
    # The interpreter computes with numpy, which warns about the infinities and NaNs that these tests use on purpose.
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)

EXACT = [(0, 0), (4, 64), (0, 5), (3, 0), (2, 3)]
POSITIONS = [[0, 63], [64], [1, 127, 128], [65, 3], [-1, 65, -1]]
"""A token of a negative position is not stored."""
EDGES = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 448.0, -448.0, 464.0, -0.0, 3e38, -1e-40, 2.0**-149, 65519.0])


def any_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return noise whose magnitude differs by head, with values of EDGES mixed in. The first row is zero, the last NaN."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-24, 16, (*shape[:-1], 1), generator=rng).float())
    x = torch.randn(shape, generator=rng) * sizes
    strewn = torch.randint(0, x.numel(), (x.numel() // 40,), generator=rng)
    x.view(-1)[strewn] = EDGES[torch.randint(0, len(EDGES), strewn.shape, generator=rng)]
    x.view(-1, shape[-1])[0], x.view(-1, shape[-1])[-1] = 0.0, math.nan
    return x


def poison_cache(layout: CacheLayout, layers: int, pages: int, buffers: int, seed: int) -> dict[str, Tensor]:
    """Return unwritten pools and buffers of L layers, and static scales with a first value of 1."""
    rng = torch.Generator().manual_seed(seed)
    stored = layout.pools(pages) | layout.exact_buffers(buffers)
    cache = {name: poison(spec, layers) for name, spec in stored.items()}
    for name, (_, shape) in layout.static_scales().items():
        cache[name] = torch.exp2(torch.randn((layers, *shape), generator=rng) * 3)
        cache[name].view(-1)[0] = 1.0
    return cache


def check(layout: CacheLayout, key: Tensor, value: Tensor, positions: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Append key and value (L, B, H, D) at `positions` with the kernel and compare the whole cache; return it."""
    rng = torch.Generator().manual_seed(seed)
    batch, columns = len(positions), max(*positions, 0) // PAGE_TOKENS + 1
    numbers = torch.randperm(batch + 2, generator=rng).int()
    tables: dict[str, Any] = {
        "page_table": torch.full((batch, columns), NO_PAGE, dtype=torch.int32),
        "lengths": torch.tensor(positions, dtype=torch.int32),
        "exact_slots": torch.randperm(batch + 1, generator=rng)[:batch].int() if layout.exact_tokens else None,
    }
    for b, position in enumerate(positions):
        if position >= 0:
            tables["page_table"][b, position // PAGE_TOKENS] = numbers[b]
    cache = poison_cache(layout, key.shape[0], batch + 2, batch + 1, seed)
    expected = {name: tensor.clone() for name, tensor in cache.items()}
    for layer in range(key.shape[0]):
        expected_layer = {name: tensor[layer] for name, tensor in expected.items()}
        reference.append(layout, key[layer], value[layer], expected_layer, **tables)
    appended = {name: tensor.to(DEVICE, copy=True) for name, tensor in cache.items()}
    launch.append(layout, key.to(DEVICE), value.to(DEVICE), appended, **on_device(tables))
    for name, tensor in expected.items():
        unequal = differs(appended[name], tensor)
        assert not unequal.any(), f"{name}: {int(unequal.sum())} differ, at {unequal.nonzero()[0].tolist()}"
        assert not name.endswith("pool") or max(positions) < 0 or differs(tensor, cache[name]).any()
    return appended


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_any_pair_of_formats_is_stored_bit_for_bit(number: int) -> None:
    value, key = VALUES[number], KEYS[5 * number % len(KEYS)]
    dim = 128 if value == "int4 128" else HEAD_DIMS[number % 3]
    heads = (1, 3, 8, 5)[number % 4]
    layout = CacheLayout(heads, dim, side(key), side(value), *EXACT[number % 5])
    positions, dtype = POSITIONS[(number // 3) % 5], DTYPES[(number // 2) % 3]
    shape = (1 + number % 2, len(positions), heads, dim)
    key_new, value_new = (any_numbers(shape, 2 * number + i).to(dtype) for i in range(2))
    check(layout, key_new, value_new, positions, seed=number)


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        ("fp8_e4m3 tensor", "int8 tensor", torch.float32),
        ("fp8_e4m3 token", "int4 32", torch.bfloat16),
        ("fp8_e4m3 token", "int4 32", torch.float32),
        ("bf16", "fp16", torch.float16),
        ("int8 head", "nvfp4 16", torch.bfloat16),
    ],
)
def test_numbers_of_every_size_are_stored_bit_for_bit(
    key: str, value: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use all numbers of 16 bits; for float32, all upper halves with random lower halves."""
    if DEVICE == "cpu":
        # The interpreter takes the same time for a small and a large tile.
        monkeypatch.setattr(variants, "APPEND_TILE", 1 << 13)
    halves = np.arange(1 << 16, dtype=np.uint32)
    low = np.random.default_rng(0).integers(0, 1 << 16, len(halves), dtype=np.uint32)
    bits = (halves << 16 | low).view(np.int32) if dtype == torch.float32 else halves.astype(np.uint16).view(np.int16)
    numbers = torch.from_numpy(bits).view(dtype).reshape(1, 8, 32, 256)
    # In `numbers`, numbers of similar magnitude share a scale. In `shuffled`, numbers of different magnitudes do.
    shuffled = numbers.reshape(256, 256).T.contiguous().reshape(1, 8, 32, 256)
    check(CacheLayout(32, 256, side(key), side(value), 0, 1), numbers, shuffled, [0] * 8)


def neighbours(x: Tensor) -> Tensor:
    """Return every number, its neighbouring float32 numbers, and the negatives of all."""
    near = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(0.0))])
    return torch.cat([near, -near])


def test_ties_round_to_even_and_other_numbers_to_the_nearest() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = neighbours(torch.cat([(codes[1:] + codes[:-1]) / 2, codes, torch.tensor([456.0, 464.0, 480.0])]))
    halves = neighbours(torch.arange(0.0, 130.0, 0.5))
    key, value = (torch.nn.functional.pad(x, (0, 2048 - len(x))).reshape(1, 4, 4, 128) for x in (ties, halves))
    layout = CacheLayout(4, 128, side("fp8_e4m3 tensor"), side("int8 tensor"))
    check(layout, key, value, [5, 5, 5, 5])
    # The dynamic scales are powers of two: a group's largest magnitude is exactly the limit.
    grouped = halves[halves.abs() < 7][:31]
    group = torch.cat([torch.tensor([7.0]), grouped]).repeat(1, 4, 4, 4)
    check(CacheLayout(4, 128, side("fp8_e4m3 token"), side("int4 32")), group * 64, group * 2.0**-10, [5, 5, 5, 5])


def exact_ties(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return numbers exactly halfway between codes or scales. Only a correctly rounded division gets these ties right."""
    form, rng = side(name), torch.Generator().manual_seed(seed)
    groups = form.groups(shape[-1])
    grouped = (*shape[:-1], groups, shape[-1] // groups)
    floats = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (floats[1:] + floats[:-1]) / 2 if form.dtype == "fp8_e4m3" else torch.arange(0.5, form.codes.limit)
    signs = torch.randint(0, 2, grouped, generator=rng) * 2 - 1
    # Scales are float16 numbers. In the second half of the sequences, they lie halfway between two float16 numbers.
    steps = torch.randint(0, 1024, (*grouped[:-1], 1), generator=rng).float()
    steps[:, shape[1] // 2 :] += 0.5
    scale = (1 + steps / 1024) * torch.exp2(torch.randint(-9, 4, steps.shape, generator=rng))
    x = ties[torch.randint(0, len(ties), grouped, generator=rng)] * signs * scale
    x[..., :1] = form.codes.limit * scale
    return x.flatten(-2)


@pytest.mark.parametrize(("key", "value"), [("fp8_e4m3 token", "int4 32"), ("int8 token", "fp8_e4m3 token")])
def test_quotients_round_once(key: str, value: str) -> None:
    """Check that x / scale and amax / limit are rounded once. Multiplying by a reciprocal would round twice."""
    shape = (1, 8, 8, 128)
    check(CacheLayout(8, 128, side(key), side(value)), exact_ties(key, shape, 0), exact_ties(value, shape, 1), [3] * 8)


def test_rows_have_a_page_each_and_the_newest_enter_the_ring() -> None:
    layout, tokens, start, recent = CacheLayout(2, 64, side("bf16"), side("int4 32"), 3, 4), 9, 60, 4
    key, value = torch.randn((2, 2, tokens, 2, 64), generator=torch.Generator().manual_seed(0))
    positions, pages = torch.arange(start, start + tokens).int(), torch.tensor([3, 1]).int()
    newest = positions >= start + tokens - recent
    ragged: dict[str, Any] = {
        "page_table": pages[positions // PAGE_TOKENS][:, None].contiguous(),
        "lengths": positions,
        "exact_slots": torch.where(newest, 1, -2).int(),
    }
    one_by_one, together = (poison_cache(layout, 2, 4, 2, seed=0) for _ in range(2))
    for layer in range(2):
        cache = {name: tensor[layer] for name, tensor in one_by_one.items()}
        for n, position in enumerate(positions):
            row, slot = slice(n, n + 1), torch.ones(1, dtype=torch.int32)
            tables = {"page_table": pages[None], "lengths": position[None], "exact_slots": slot}
            reference.append(layout, key[layer, row], value[layer, row], cache, **tables)
    together = on_device(together)
    launch.append(layout, key.to(DEVICE), value.to(DEVICE), together, **on_device(ragged))
    for name, tensor in one_by_one.items():
        assert not differs(together[name], tensor).any(), name


def test_a_page_table_without_columns_is_refused_before_a_launch() -> None:
    layout = CacheLayout(2, 64, side("fp16"), side("fp16"))
    cache = {name: tensor.to(DEVICE) for name, tensor in poison_cache(layout, 1, 2, 1, 0).items()}
    new = torch.zeros(1, 1, 2, 64, device=DEVICE)
    table, lengths = torch.zeros(1, 0, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"^page_table must have at least one column$"):
        launch.append(layout, new, new, cache, table, lengths)
