"""The kernels of decoding and of several new tokens against the reference: on a GPU, or in Triton's interpreter without one.

All memory that must not be read is filled with poison, and outputs are NaN before they are written. At the end: a decode
step's work list, and refused launches. Legend: B sequences, X new tokens of all sequences, H KV heads, D head_dim.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.kernels.cases import DEVICE, DTYPES, KEYS, VALUES, KernelCase, case_of, on_device, side
from helpers.stride import STRIDE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.layout import HEAD_DIMS, PAGE_TOKENS, CacheLayout

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

TOLERANCE = 2e-3
"""Largest relative L2 error of a new token's output."""

GROUPS = (1, 3, 4, 8, 16)
EXACT = [(0, 0), (4, 64), (0, 17), (5, 0), (3, 5), (0, 65)]
DECODED = [[64, 1, 129], [0, 127], [200, 65, 63], [128, 5], [0, 191, 2]]
CHUNKED = [([64, 1], 3), ([0, 70], 5), ([65, 63], 4), ([130], 7)]


def compare(case: KernelCase, out: Tensor, scaling: float, tolerance: float = TOLERANCE) -> None:
    """Compare an output (X, Hq, D) with the reference's."""
    expected = case.expected(scaling)
    errors = (out.float().cpu() - expected.to(out.dtype).float()).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert out.dtype == case.dtype
    assert errors.max() < tolerance, errors


def check_partials(case: KernelCase, partial_acc: Tensor, partial_ml: Tensor, valid: Tensor) -> None:
    """Check that means are written where `valid` is true, and only there."""
    assert partial_acc.dtype == (torch.float32 if case.dtype == torch.float32 else torch.float16)
    assert partial_ml.dtype == torch.float32
    assert partial_acc[valid].isfinite().all()
    assert partial_acc[~valid].isnan().all()
    assert partial_ml[..., 1][valid].isfinite().all()


def check_decode(case: KernelCase, programs: int, scaling: float | None = None) -> None:
    """Run the kernels of a decode step, and compare their output with the reference's."""
    layout, arguments = case.layout, case.arguments
    scaling = layout.head_dim**-0.5 if scaling is None else scaling
    plan = launch.plan_decode(layout, arguments["lengths"], programs=programs)
    partials = launch.decode_partials(layout, **arguments, plan=plan, scaling=scaling)
    maximum, weight = partials[1].unbind(-1)
    valid = ~maximum.isnan()
    check_partials(case, *partials, valid)
    assert (valid.all(1) == valid.any(1)).all()
    pages = [-(-max(0, n - layout.recent_tokens) // PAGE_TOKENS) - layout.sink_tokens // PAGE_TOKENS for n in case.lengths]
    assert valid.any(1).sum() <= sum(max(1, n) for n in pages) + len(pages) * (layout.exact_tokens > 0)
    assert (maximum[weight == 0.0] == -math.inf).all()
    compare(case, launch.reduce_partials(layout, *partials, case.dtype, plan), scaling)


def check_context(case: KernelCase, splits: int) -> None:
    """Run the kernels of several new tokens, and compare their output with the reference's."""
    layout, scaling = case.layout, case.layout.head_dim**-0.5
    partials = launch.context_partials(layout, **case.arguments, scaling=scaling, splits=splits)
    assert partials[0].shape == (len(case.query), splits + 1, *case.query.shape[1:])
    maximum, weight = partials[1].unbind(-1)
    assert not partials[1].isnan().any()
    empty = weight == 0.0
    check_partials(case, *partials, ~empty)
    assert (maximum[empty] == -math.inf).all()
    assert not empty[:, 0].any(), "the split of the new tokens is never empty"
    # A bfloat16 output is rounded to 8 bits, as is the query.
    tolerance = TOLERANCE * (2 if case.dtype == torch.bfloat16 else 1)
    compare(case, launch.reduce_partials(layout, *partials, case.dtype), scaling, tolerance)


@pytest.mark.every
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_any_pair_of_formats_attends_as_the_reference(number: int) -> None:
    """Derive all options from `number`. `make test` decodes with odd numbers, and runs chunks of prompts with even numbers."""
    key, value = KEYS[5 * number % len(KEYS)], VALUES[number]
    sink, recent = EXACT[number % len(EXACT)]
    heads, dim = 2 if "head" in key + value else 1, 128 if value == "int4 128" else HEAD_DIMS[number % 3]
    if STRIDE == 1 or number % 2:
        group, dtype = GROUPS[(number // 2) % 5], DTYPES[(number // 3) % 3]
        case = case_of(
            key, value, heads, dim, DECODED[number % 5], sink=sink, recent=recent, group=group, dtype=dtype, seed=number
        )
        check_decode(case, programs=1 + number % 5)
    if STRIDE == 1 or not number % 2:
        lengths, tokens = CHUNKED[number % 4]
        group, dtype = GROUPS[number % 5], DTYPES[number % 3]
        case = case_of(
            key, value, heads, dim, lengths, sink=sink, recent=recent, group=group, dtype=dtype, seed=number, tokens=tokens
        )
        check_context(case, splits=1 + number // 2 % 2)


def test_twelve_heads_and_groups_of_128_in_the_largest_head() -> None:
    check_decode(case_of("int8 token", "int4 128", 1, 256, [65, 3], group=12, dtype=torch.float16, seed=12), programs=2)


def test_every_length_around_a_page_boundary() -> None:
    lengths = [0, 1, 63, 64, 65, 127, 128, 129]
    check_decode(case_of("fp8_e4m3 token", "int4 64", 1, 128, lengths, sink=65, group=8, seed=65), programs=7)


@pytest.mark.parametrize(("programs", "recent"), [(3, 30), (17, 0)])
def test_many_parts_join_and_a_program_attends_to_several(programs: int, recent: int) -> None:
    check_decode(case_of("fp8_e4m3 tensor", "int4 32", 1, 64, [451, 64, 0, 5], recent=recent, seed=programs), programs)


@pytest.mark.parametrize(("size", "scaling"), [(2.0**9, 2.0**-12), (1.0, 3.0)])
def test_sharp_and_flat_attention_of_large_and_small_queries(size: float, scaling: float) -> None:
    case = case_of("int8 token", "int4 64", 1, 128, [130, 1], sink=2, recent=3, dtype=torch.float32)
    case.query = case.query * size
    check_decode(case, 2, scaling)


def test_a_value_as_large_as_float16_holds_does_not_overflow() -> None:
    case = case_of("fp8_e4m3 token", "int4 64", 1, 128, [130], dtype=torch.float32)
    case.cache["value_scale_pool"][case.page_table[0, 1]] = 9000.0
    case.cache["value_scale_pool"][case.page_table[0, 0], :, :50] = 2.0**-14
    check_decode(case, programs=1)
    assert case.expected(128**-0.5).abs().amax() > 100.0


def test_large_values_saturate_and_nan_and_infinity_are_kept() -> None:
    case = case_of("bf16", "bf16", 1, 64, [130, 130, 130], group=1)
    case.cache["value_pool"][:] = 0.0
    case.cache["value_pool"][case.page_table[0, :3].long(), :, :, 0] = 1e5
    case.cache["value_pool"][case.page_table[1, 1].long(), :, 7, 0] = math.nan
    case.value_new[:] = 0.0
    case.value_new[0, :, 0] = 1e5
    case.value_new[2, :, 0] = math.inf
    arguments = case.arguments
    plan = launch.plan_decode(case.layout, arguments["lengths"], programs=2)
    out = launch.decode_attention(case.layout, **arguments, plan=plan, scaling=0.1)
    assert out[0, 0, 0] == torch.tensor(65504.0).bfloat16()
    assert out[1, 0, 0].isnan()
    assert out[2, 0, 0] == math.inf
    assert (out[:, :, 1:] == 0.0).all()


@pytest.mark.parametrize(
    ("key", "value", "lengths", "tokens", "options", "splits"),
    [
        ("fp8_e4m3 tensor", "int4 32", [1100, 64], 2, {"recent": 30}, 4),
        # 9 tokens with 16 heads give more rows than a block has columns, and the last block is not full.
        ("int8 token", "int4 64", [40, 3], 9, {"group": 16}, 1),
    ],
    ids=["some splits are empty", "several blocks"],
)
def test_chunks_in_splits_and_blocks_attend_as_the_reference(
    key: str, value: str, lengths: list[int], tokens: int, options: dict[str, int], splits: int
) -> None:
    check_context(case_of(key, value, 1, 64, lengths, tokens=tokens, **options), splits)


@pytest.mark.parametrize(
    ("sequences", "tokens", "message"),
    [(0, 0, "at least one sequence and one new token"), (1, 0, "at least one"), (2, 3, "cannot be divided evenly")],
)
def test_numbers_of_new_tokens_that_no_launch_takes_are_refused(sequences: int, tokens: int, message: str) -> None:
    arguments = case_of("fp8_e4m3 token", "int4 64", 1, 64, [64, 64], tokens=2).arguments
    arguments |= {name: arguments[name][:tokens] for name in ("query", "key_new", "value_new")}
    arguments |= {name: arguments[name][:sequences] for name in ("lengths", "page_table")}
    with pytest.raises(ValueError, match=message):
        launch.context_attention(case_of("fp8_e4m3 token", "int4 64", 1, 64, [64]).layout, **arguments, scaling=0.1)


def test_pages_beyond_2_31_elements_are_read_where_they_lie() -> None:
    """The pools consist of untouched memory, except for the last page."""
    torch.use_deterministic_algorithms(False)
    case = case_of("int8 tensor", "int8 tensor", 1, 64, [9], tokens=2)
    last = 2**31 // (PAGE_TOKENS * 64)
    near = case.arguments
    far = near | {"cache": dict(near["cache"]), "page_table": torch.full_like(near["page_table"], last)}
    for name in ("key_pool", "value_pool"):
        pool = torch.empty(last + 1, 1, PAGE_TOKENS, 64, dtype=torch.int8, device=DEVICE)
        pool[last] = near["cache"][name][case.page_table[0, 0]]
        far["cache"][name] = pool
    outputs = [launch.context_attention(case.layout, **arguments, scaling=0.1) for arguments in (near, far)]
    assert torch.equal(*outputs)


def plan_of(lengths: Sequence[int], programs: int, exact: tuple[int, int] = (0, 0)) -> tuple[list[list[int]], ...]:
    """Return the rows of the work list, and of the sequences."""
    layout = CacheLayout(1, 64, side("fp16"), side("fp16"), *exact)
    plan = launch.plan_decode(layout, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), programs=programs)
    return tuple(rows.tolist() for rows in plan)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20_000)), min_size=1, max_size=40),
    programs=st.integers(1, 150),
    exact=st.sampled_from([(0, 0), (4, 60), (70, 0), (0, 65)]),
)
def test_every_page_is_read_once_and_every_part_is_joined(lengths: list[int], programs: int, exact: tuple[int, int]) -> None:
    work, sequences = plan_of(lengths, programs, exact)
    sink, recent = exact
    reads: Counter[tuple[int, int]] = Counter()
    parts_of: list[list[int]] = [[] for _ in lengths]
    for first, stop, low, high, part in work:
        for b in range(first, stop):
            begin, end, _, _ = sequences[b]
            assert low < high
            reads.update((b, page - begin + sink // PAGE_TOKENS) for page in range(max(low, begin), min(high, end)))
            parts_of[b].append(part + (b - first) * (2 if sum(exact) else 1))
        if stop == first:
            parts_of[first].insert(0, part)
    for b, (length, (_, _, first, parts)) in enumerate(zip(lengths, sequences, strict=True)):
        assert parts_of[b] == list(range(first, first + parts))
        pages_read = {page for owner, page in reads if owner == b}
        assert pages_read >= {position // PAGE_TOKENS for position in range(sink, max(sink, length - recent))}
        assert len(pages_read) <= max(1, -(-length // PAGE_TOKENS))
    assert set(reads.values()) == {1}
    every = [number for numbers in parts_of for number in numbers]
    assert len(set(every)) == len(every)
    assert max(every) < len(work) + len(lengths)


def shifted(x: Tensor) -> Tensor:
    """Return an equal contiguous tensor that starts one element after an aligned address."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


WRONG: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "strides": ("value_pool", lambda x: x.mT.contiguous().mT, "value_pool must be int8 .*, contiguous .*; got int8 .* strides"),
    "type": ("page_table", Tensor.long, r"page_table must be int32 on .*; got int64"),
    "new type": ("value_new", Tensor.half, r"value_new must be float32 on .*; got float16"),
    "address": ("value_pool", shifted, r"value_pool must be .* a pool at a multiple of 16 bytes; got .*, address 0x\w+"),
    "device": ("lengths", lambda x: x.to("meta"), rf"lengths must be int32 on {DEVICE}.*; got int32 on meta"),
    "rows": ("page_table", lambda x: x[:1], r"(page_table|lengths) must be \(.*\), got \(.*\)"),
    "heads": ("value_new", lambda x: x[..., :1, :], r"value_new must be \(.*2, 2, 64\), got \(.*2, 1, 64\)"),
    "absent": ("value_exact", lambda _: None, r"must have the tensors .*value_exact.*; got"),
}


@pytest.mark.parametrize("operation", ["append", "decode_attention", "context_attention"])
@pytest.mark.parametrize("wrong", WRONG)
def test_mismatched_tensors_are_refused_before_any_write(operation: str, wrong: str) -> None:
    """The layout has static and dynamic scales, and exact tokens."""
    name, change, message = WRONG[wrong]
    case = case_of("int8 tensor", "int4 32", 2, 64, [65, 1], sink=1, recent=2, dtype=torch.float32)
    cache, step = on_device(case.cache), on_device(case.step)
    options: dict[str, Any] = {"scaling": 0.1}
    if operation == "append":
        cache = {key: tensor[None] for key, tensor in cache.items()}
        step |= {key: step[key][None] for key in ("key_new", "value_new")}
        del step["query"], options["scaling"]
    elif operation == "decode_attention":
        options["plan"] = launch.plan_decode(case.layout, step["lengths"], programs=2)
    before = {key: tensor.clone() for key, tensor in cache.items()}
    arguments = {key: change(tensor) if key == name else tensor for key, tensor in (cache | step).items()}
    changed = {key: arguments[key] for key in cache if arguments[key] is not None}
    with pytest.raises(ValueError, match=message):
        getattr(launch, operation)(case.layout, cache=changed, **{key: arguments[key] for key in step}, **options)
    for key, tensor in before.items():
        assert torch.equal(cache[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_too_many_layers_and_invalid_plans_are_refused() -> None:
    case = case_of("int8 tensor", "int4 32", 2, 64, [65, 1])
    step = on_device(case.step)
    new = {name: step[name].repeat(2, 1, 1, 1) for name in ("key_new", "value_new")}
    tables = {name: step[name] for name in ("page_table", "lengths")}
    with pytest.raises(ValueError, match=r"key_pool must be \(2, N, 2, 64, 64\), got \(1, 7, 2, 64, 64\)"):
        launch.append(case.layout, cache={name: x[None] for name, x in on_device(case.cache).items()}, **new, **tables)
    for lengths, programs, message in (
        (torch.zeros(2, 1).int(), 1, r"lengths must be \(B\), got \(2, 1\)"),
        (torch.zeros(2).int(), 0, "programs must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.plan_decode(case.layout, lengths, programs=programs)
