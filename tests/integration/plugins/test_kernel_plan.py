"""Work is divided by the sequences' lengths: reads of every program, number of partial results, and arbitrary page tables.

The device has the numbers of an H100: 132 SMs with 7 programs each, and 8 KV heads. Legend: H KV heads, W programs over the
pages of a KV head.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, planned, side
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
def test_what_is_no_row_of_lengths_is_refused(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch.plan_decode(PLAIN, lengths, programs=1)
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"):
        launch.plan_decode(PLAIN, torch.zeros(1, dtype=torch.int32), programs=0)
