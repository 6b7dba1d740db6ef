"""A launch: refusals, and work divided by the lengths: every program's reads, partial results, any page table.

The device has the numbers of an H100: 132 SMs with 7 programs each, and 8 KV heads. Legend: H KV heads, W programs over the
pages of a KV head.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels.cases import DEVICE, planned, side
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout

SMS, RESIDENT, HEADS = 132, 7, 8
PLAIN = CacheLayout(1, 64, side("fp16"), side("fp16"))
KIB = 1024


def plan_of(lengths: Sequence[int], max_tokens: int) -> launch.DecodePlan:
    """Return the plan for the device above, with a page table as wide as the longest possible sequence."""
    max_pages = -(-max_tokens // PAGE_TOKENS)
    programs = launch.choose_programs(len(lengths), HEADS, max_pages, sm_count=SMS, resident=RESIDENT)
    return launch.DecodePlan(*(x.cpu() for x in planned(PLAIN, tensor(lengths), programs)))


def tensor(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def tokens_by_program(plan: launch.DecodePlan, lengths: Sequence[int]) -> list[int]:
    """Return the tokens read per program, for the programs of a KV head that have work, without exact tokens."""
    tokens = []
    for first, stop, low, high, _ in plan.work.tolist():
        read = 0
        for b in range(first, stop):
            begin, end = plan.sequences[b, :2].tolist()
            pages = max(low, begin) - begin, min(high, end) - begin
            read += max(0, min(pages[1] * PAGE_TOKENS, lengths[b]) - pages[0] * PAGE_TOKENS)
        tokens += [read] if stop > first else []
    return tokens


@pytest.mark.parametrize(
    "lengths",
    [
        [15 * KIB],
        [128 * KIB] + [KIB] * 31,
        [8 * KIB] * 32,
        [2 * KIB] * 115,
        [128 * KIB] + [100] * 1023,
        [int(x) for x in np.random.default_rng(0).pareto(1.0, 300) * 500 + 1],
    ],
    ids=["one", "long first", "32 equal", "115 equal", "1,024", "pareto"],
)
def test_no_program_reads_half_more_than_its_share(lengths: list[int]) -> None:
    """A share is all sequences' tokens divided by the programs that run at once. It is at least two pages here."""
    tokens = tokens_by_program(plan_of(lengths, 128 * KIB), lengths)
    assert sum(tokens) == sum(lengths)
    at_once = SMS * RESIDENT // HEADS
    assert len(tokens) <= at_once
    assert max(tokens) <= 1.5 * sum(lengths) / at_once


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20_000)), min_size=1, max_size=40),
    programs=st.integers(1, 150),
    exact=st.sampled_from([(0, 0), (4, 60), (70, 0), (0, 65)]),
)
def test_every_page_is_read_once_and_every_part_is_joined(lengths: list[int], programs: int, exact: tuple[int, int]) -> None:
    layout = CacheLayout(1, 64, side("fp16"), side("fp16"), *exact)
    plan = planned(layout, tensor(lengths), programs)
    work, sequences = (x.tolist() for x in plan)
    sink, recent = exact
    read: Counter[tuple[int, int]] = Counter()
    written: list[list[int]] = [[] for _ in lengths]
    for first, stop, low, high, part in work:
        for b in range(first, stop):
            begin, end, _, _ = sequences[b]
            assert low < high
            read.update((b, page - begin + sink // PAGE_TOKENS) for page in range(max(low, begin), min(high, end)))
            written[b].append(part + (b - first) * (2 if sum(exact) else 1))
        if stop == first:
            written[first].insert(0, part)
    for b, (length, (_, _, first, parts)) in enumerate(zip(lengths, sequences, strict=True)):
        assert written[b] == list(range(first, first + parts))
        seen = {page for owner, page in read if owner == b}
        assert seen >= {position // PAGE_TOKENS for position in range(sink, max(sink, length - recent))}
        assert len(seen) <= max(1, -(-length // PAGE_TOKENS))
    assert set(read.values()) == {1}
    parts = [number for numbers in written for number in numbers]
    assert len(set(parts)) == len(parts)
    assert max(parts) < len(work) + len(lengths)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [(torch.zeros(2, 1, dtype=torch.int32), r"lengths must be \(B\), got \(2, 1\)"), (torch.zeros(2), "must be torch.int32")],
)
def test_invalid_lengths_are_refused(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch.plan_decode(PLAIN, lengths, programs=1)
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"):
        launch.plan_decode(PLAIN, torch.zeros(1, dtype=torch.int32), programs=0)


LAYERS = 2
EVERYTHING = CacheLayout(2, 64, side("int8 tensor"), side("int4 32"), sink_tokens=1, recent_tokens=2)
"""A layout with static and dynamic scales and exact tokens."""
TABLES = ("page_table", "lengths", "exact_slots")


def arguments(layout: CacheLayout) -> dict[str, Tensor]:
    """Return the tensors of an append to zeroed caches of two sequences, in all layers."""
    specs = layout.pools(3) | layout.exact_buffers(2) | layout.static_scales()
    tensors = {name: torch.zeros(LAYERS, *shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in specs.items()}
    tensors |= {name: tensors[name] + 0.02 for name in layout.static_scales()}
    numbers = {"page_table": [[0, 2], [1, 0]], "lengths": [65, 0], "exact_slots": [1, 0]}
    tensors |= {name: torch.tensor(rows, dtype=torch.int32) for name, rows in numbers.items()}
    key, value = torch.randn(2, LAYERS, 2, layout.kv_heads, layout.head_dim, generator=torch.Generator().manual_seed(0))
    return {name: x.to(DEVICE) for name, x in (tensors | {"key_new": key, "value_new": value}).items()}


def of_one_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an attention in the first layer, with two query heads per KV head."""
    one = {name: x if name in TABLES else x[0] for name, x in tensors.items()}
    return one | {"query": one["key_new"].repeat_interleave(2, 1)}


def run(operation: str, layout: CacheLayout, tensors: dict[str, Any]) -> Any:
    """Launch `append` or `decode_attention`."""
    new = {name: tensors[name] for name in ("query", "key_new", "value_new", *TABLES) if name in tensors}
    cache = {name: x for name, x in tensors.items() if name not in new and x is not None}
    if operation == "append":
        return launch.append(layout, cache=cache, **new)
    plan = planned(layout, torch.tensor([65, 0], dtype=torch.int32, device=DEVICE), programs=2)
    return launch.decode_attention(layout, cache=cache, plan=plan, scaling=0.125, **new)


def spread(x: Tensor) -> Tensor:
    """Return the same numbers in every other element of memory."""
    return torch.stack([x, x], -1)[..., 0]


def shifted(x: Tensor) -> Tensor:
    """Return an equal contiguous tensor that starts one element after an aligned address."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


WRONG: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("page_table", spread, r"page_table must be contiguous, got strides \(4, 2\) of shape \(2, 2\): make it so"),
    ("value_pool", lambda x: x.mT.contiguous().mT, "value_pool must be contiguous, got strides"),
    ("page_table", Tensor.long, r"page_table must be torch\.int32, got torch\.int64"),
    ("page_table", lambda x: x[:1], r"page_table must be \(2, P\), got \(1, 2\)"),
    ("value_pool", shifted, r"value_pool must begin at a multiple of 16 bytes, got 0x\w+: clone\(\) it"),
    ("key_pool", Tensor.float, r"key_pool must be torch\.int8, got torch\.float32"),
    ("value_exact", lambda _: None, r"must have the layout's tensors; wanted and got: .*value_exact.* and"),
    ("key_scale", lambda x: x.repeat_interleave(3, -1), r"key_scale must be \(.*1,?\), got \(.*3,?\)"),
    ("value_new", lambda x: x[..., :1, :], r"value_new must be \(.*2, 2, 64\), got \(.*2, 1, 64\)"),
    ("key_new", Tensor.double, r"key_new must be one of torch\.float32, .*, got torch\.float64"),
    ("lengths", lambda x: x.to("meta"), rf"lengths must be on {DEVICE}\S*, where the other tensors are, got meta"),
]


@pytest.mark.parametrize("operation", ["append", "decode_attention"])
@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)])
def test_tensors_that_the_kernels_would_misread_are_refused_and_nothing_is_written(
    operation: str, name: str, change: Any, message: str
) -> None:
    named = arguments(EVERYTHING) if operation == "append" else of_one_layer(arguments(EVERYTHING))
    before = {key: x.clone() for key, x in named.items()}
    with pytest.raises(ValueError, match=message):
        run(operation, EVERYTHING, named | {name: change(named[name])})
    for key, x in before.items():
        assert torch.equal(named[key].view(torch.uint8), x.view(torch.uint8)), key


def test_an_append_of_more_layers_than_the_cache_has_is_refused() -> None:
    named = arguments(EVERYTHING)
    doubled = {name: named[name].repeat(2, 1, 1, 1) for name in ("key_new", "value_new")}
    with pytest.raises(ValueError, match=r"key_pool must be \(4, N, 2, 64, 64\), got \(2, 3, 2, 64, 64\)"):
        run("append", EVERYTHING, named | doubled)
