"""The decode kernels against the reference: on a GPU, or in Triton's interpreter without one.

All memory that must not be read is filled with poison, and outputs are NaN before they are written. Legend: B sequences, Hq
query heads, D head_dim, R parts.
"""

import math
from typing import Any

import pytest
import torch
from helpers.kernels.cases import DEVICE, DTYPES, KEYS, VALUES, Case, case_of, on_device, planned
from helpers.stride import STRIDE

from plugins.kv_attention import launch
from plugins.kv_attention.layout import HEAD_DIMS, PAGE_TOKENS

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

TOLERANCE = 2e-3
"""Largest relative L2 error of a sequence's output."""

BOUNDARIES = [0, 1, 63, 64, 65, 127, 128, 129]


def check(case: Case, programs: int, scaling: float | None = None) -> None:
    """Run the kernels on a case and compare their output with the reference's."""
    layout = case.layout
    scaling = layout.head_dim**-0.5 if scaling is None else scaling
    query, key, value = (tensor.to(DEVICE) for tensor in (case.query, case.key_new, case.value_new))
    cache, tables = on_device(case.cache), on_device(case.tables)
    plan = planned(layout, tables["lengths"], programs)
    partial_acc, partial_ml = launch.decode_partials(layout, query, key, value, cache, plan=plan, scaling=scaling, **tables)
    assert partial_acc.dtype == (torch.float32 if case.dtype == torch.float32 else torch.float16)
    assert partial_ml.dtype == torch.float32
    maximum, weight = partial_ml.unbind(-1)
    written = ~maximum.isnan()
    assert partial_acc[written].isfinite().all()
    assert partial_acc[~written].isnan().all()
    assert (written.all(1) == written.any(1)).all()
    pages = [-(-max(0, n - layout.recent_tokens) // PAGE_TOKENS) - layout.sink_tokens // PAGE_TOKENS for n in case.lengths]
    assert written.any(1).sum() <= sum(max(1, n) for n in pages) + len(pages) * (layout.exact_tokens > 0)
    assert weight[written].isfinite().all()
    assert (maximum[weight == 0.0] == -math.inf).all()
    out = launch.reduce_partials(layout, partial_acc, partial_ml, plan, case.dtype)
    assert out.dtype == case.dtype
    for length, actual, expected in zip(case.lengths, out.float().cpu(), case.expected(scaling), strict=True):
        error = (actual - expected).norm() / expected.norm()
        assert error < TOLERANCE, f"length {length}: relative L2 {error:.1e}"


GROUPS = (1, 3, 4, 8, 16)
EXACT = [(0, 0), (4, 64), (0, 17), (0, 0), (5, 0), (3, 5), (0, 65)]
RAGGED = [[64, 1, 129], [0, 127], [200, 65, 63], [128, 5], [0, 191, 2]]


def matrix() -> list[tuple[str, str, int]]:
    """Return every value format with a key format, and a number that varies the remaining options.

    `make test` uses the value formats that test_kernel_context.py does not use in `make test`.
    """
    pairs = [(KEYS[5 * number % len(KEYS)], value, number) for number, value in enumerate(VALUES)]
    return pairs if STRIDE == 1 else pairs[1::2]


@pytest.mark.every
@pytest.mark.parametrize(("key", "value", "number"), matrix())
def test_any_pair_of_formats_attends_as_the_reference(key: str, value: str, number: int) -> None:
    dim = 128 if value == "int4 128" else HEAD_DIMS[number % 3]
    sink, recent = EXACT[number % len(EXACT)]
    heads = 2 if "head" in key + value else 1
    lengths, group, dtype = RAGGED[number % 5], GROUPS[(number // 2) % 5], DTYPES[(number // 3) % 3]
    case = case_of(key, value, heads, dim, lengths, sink=sink, recent=recent, group=group, dtype=dtype, seed=number)
    check(case, programs=1 + number % 5)


def test_twelve_query_heads_and_groups_of_128_channels_in_the_largest_head() -> None:
    check(case_of("int8 token", "int4 128", 1, 256, [65, 3], group=12, dtype=torch.float16, seed=12), programs=2)


def test_every_length_around_a_page_boundary() -> None:
    check(case_of("fp8_e4m3 token", "int4 64", 1, 128, BOUNDARIES, sink=65, group=8, seed=65), programs=7)


@pytest.mark.parametrize(("programs", "recent"), [(3, 30), (17, 0)])
def test_sequences_of_many_parts_join_and_a_program_attends_to_several(programs: int, recent: int) -> None:
    check(case_of("fp8_e4m3 tensor", "int4 32", 1, 64, [451, 64, 0, 5], recent=recent, seed=programs), programs)


def test_two_sequences_share_the_pages_of_their_prefix() -> None:
    case = case_of("fp8_e4m3 token", "int4 64", 2, 128, [200, 170], shared_pages=2, group=3)
    assert torch.equal(case.page_table[0, :2], case.page_table[1, :2])
    assert not torch.equal(case.page_table[0, 2], case.page_table[1, 2])
    check(case, programs=2)


@pytest.mark.parametrize(("size", "scaling"), [(2.0**9, 2.0**-12), (1.0, 3.0)])
def test_sharp_and_flat_attention_of_large_and_small_queries(size: float, scaling: float) -> None:
    case = case_of("int8 token", "int4 64", 1, 128, [130, 1], sink=2, recent=3, dtype=torch.float32)
    case.query = case.query * size
    check(case, 2, scaling)


def test_a_value_as_large_as_float16_holds_does_not_overflow() -> None:
    case = case_of("fp8_e4m3 token", "int4 64", 1, 128, [130], dtype=torch.float32)
    case.cache["value_scale_pool"][case.page_table[0, 1]] = 9000.0
    case.cache["value_scale_pool"][case.page_table[0, 0], :, :50] = 2.0**-14
    check(case, programs=1)
    assert case.expected(128**-0.5).abs().amax() > 100.0


def step_of(case: Case) -> dict[str, Any]:
    """Return a case's tensors by argument name."""
    new = {"query": case.query, "key_new": case.key_new, "value_new": case.value_new}
    return on_device(new | case.tables) | {"cache": on_device(case.cache)}


def test_values_beyond_float16_become_its_largest_and_nan_and_infinity_are_kept() -> None:
    case = case_of("bf16", "bf16", 1, 64, [130, 130, 130], group=1)
    case.cache["value_pool"][:] = 0.0
    case.cache["value_pool"][case.page_table[0, :3].long(), :, :, 0] = 1e5
    case.cache["value_pool"][case.page_table[1, 1].long(), :, 7, 0] = math.nan
    case.value_new[:] = 0.0
    case.value_new[0, :, 0] = 1e5
    case.value_new[2, :, 0] = math.inf
    plan = planned(case.layout, on_device(case.tables)["lengths"], programs=2)
    out = launch.decode_attention(case.layout, **step_of(case), plan=plan, scaling=0.1)
    assert out[0, 0, 0] == torch.tensor(65504.0).bfloat16()
    assert out[1, 0, 0].isnan()
    assert out[2, 0, 0] == math.inf
    assert (out[:, :, 1:] == 0.0).all()
