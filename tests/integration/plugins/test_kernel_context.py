"""The context kernels against the reference: on a GPU, or in Triton's interpreter without one.

All memory that must not be read is filled with poison, and outputs are NaN before they are written. Legend: B sequences, X
new tokens of all sequences, H KV heads, Hq query heads, D head_dim, S splits.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from helpers.kernels.cases import DEVICE, DTYPES, KEYS, VALUES, Case, case_of, on_device, planned, side
from helpers.stride import STRIDE
from torch import Tensor

from benchmarks import attention_reference as reference
from plugins.kv_attention import launch
from plugins.kv_attention.layout import HEAD_DIMS, PAGE_TOKENS, CacheLayout

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

TOLERANCE = 2e-3
"""Largest relative L2 error of a new token's output."""


@dataclass
class Chunk:
    """New tokens of a case's sequences."""

    case: Case
    counts: list[int]
    """Number of new tokens of every sequence."""

    def __post_init__(self) -> None:
        layout, dtype, tokens = self.case.layout, self.case.dtype, sum(self.counts)
        heads, dim = layout.kv_heads, layout.head_dim
        self.query = self.case.random(tokens, heads * self.case.group, dim).to(dtype)
        self.key_new, self.value_new = (self.case.random(tokens, heads, dim).to(dtype) for _ in range(2))
        self.starts = torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32)

    @property
    def arguments(self) -> dict[str, Any]:
        step = {"query": self.query, "key_new": self.key_new, "value_new": self.value_new}
        return on_device(step | self.case.tables | {"query_starts": self.starts}) | {"cache": on_device(self.case.cache)}

    def expected(self, scaling: float) -> Tensor:
        """Return the reference's attention, (X, Hq, D) float32."""
        step = (self.query, self.key_new, self.value_new)
        starts = self.starts
        return reference.attend(
            self.case.layout, *step, self.case.cache, query_starts=starts, scaling=scaling, **self.case.tables
        )

    def compare(self, out: Tensor, scaling: float) -> None:
        """Compare an output with the reference's."""
        expected = self.expected(scaling)
        # A bfloat16 output is rounded to 8 bits, as is the query.
        errors = (out.float().cpu() - expected.to(out.dtype).float()).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        assert errors.max() < TOLERANCE * (2 if out.dtype == torch.bfloat16 else 1), errors

    def check(self, splits: int, scaling: float | None = None) -> None:
        """Run both kernels and compare their output with the reference's."""
        layout = self.case.layout
        scaling = layout.head_dim**-0.5 if scaling is None else scaling
        partial_acc, partial_ml = launch.context_partials(layout, **self.arguments, scaling=scaling, splits=splits)
        assert partial_acc.shape == (*self.query.shape[:2], splits + 1, layout.head_dim)
        assert partial_acc.dtype == (torch.float32 if self.case.dtype == torch.float32 else torch.float16)
        assert partial_ml.dtype == torch.float32
        maximum, weight = partial_ml.unbind(-1)
        assert not maximum.isnan().any()
        assert weight.isfinite().all()
        empty = weight == 0.0
        assert (maximum[empty] == -math.inf).all()
        assert not empty[..., -1].any(), "the split of the new tokens is never empty"
        assert partial_acc[~empty].isfinite().all()
        assert partial_acc[empty].isnan().all(), "sums of empty splits are written, although they are never read"
        out = launch.join_partials(layout, partial_acc, partial_ml, self.case.dtype)
        assert out.dtype == self.case.dtype
        self.compare(out, scaling)


def chunk_of(key: str, value: str, heads: int, dim: int, lengths: list[int], counts: list[int], **more: Any) -> Chunk:
    """Return a chunk. `more`: `sink` and `recent` tokens, and fields of Case."""
    return Chunk(case_of(key, value, heads, dim, lengths, **more), counts)


GROUPS = (1, 3, 4, 8, 16)
EXACT = [(0, 0), (4, 64), (0, 17), (5, 0), (3, 5)]
RAGGED = [([64, 1], [3, 2]), ([0, 70], [5, 1]), ([65, 63], [0, 4]), ([130], [7])]


@pytest.mark.every
@pytest.mark.parametrize(("number", "value"), list(enumerate(VALUES))[:: 1 if STRIDE == 1 else 2])
def test_any_format_attends_as_the_reference(number: int, value: str) -> None:
    key = KEYS[5 * number % len(KEYS)]
    sink, recent = EXACT[number % len(EXACT)]
    lengths, counts = RAGGED[number % len(RAGGED)]
    chunk = chunk_of(
        key, value, 2 if "head" in key + value else 1, 128 if value == "int4 128" else HEAD_DIMS[number % 3], lengths, counts,
        sink=sink, recent=recent, group=GROUPS[number % 5], dtype=DTYPES[number % 3], seed=number,
    )  # fmt: skip
    chunk.check(splits=1 + number % 2)


def test_long_histories_are_split_and_splits_of_none_join() -> None:
    chunk_of("fp8_e4m3 tensor", "int4 32", 1, 64, [1100, 64], [2, 1], recent=30, group=4).check(splits=4)


def test_a_chunk_of_several_blocks_is_causal() -> None:
    """9 tokens with 16 heads give more rows than a block has columns, and the last block is not full."""
    chunk_of("int8 token", "int4 64", 1, 64, [40, 3], [9, 2], group=16).check(1)


def test_one_token_of_each_sequence_is_a_decode_step() -> None:
    chunk = chunk_of("fp8_e4m3 token", "int4 64", 2, 64, [70, 5], [1, 1], sink=2, recent=3, dtype=torch.float32)
    case, arguments = chunk.case, chunk.arguments
    del arguments["query_starts"]
    out = launch.context_attention(case.layout, **arguments, scaling=0.1)
    plan = planned(case.layout, arguments["lengths"], programs=1)
    step = launch.decode_attention(case.layout, **arguments, plan=plan, scaling=0.1)
    assert (out - step).norm() < 1e-3 * step.norm()


def test_a_batch_in_which_most_sequences_have_no_new_token() -> None:
    """Use more sequences than the kernel compares at once, so that empty sequences lie between those with rows."""
    counts = [0] * 132
    counts[2], counts[130], counts[131] = 2, 1, 1
    chunk_of("fp8_e4m3 tensor", "fp8_e4m3 tensor", 1, 64, [1] * 132, counts, group=1).check(1)


def test_pages_beyond_2_31_elements_are_read_where_they_lie() -> None:
    """The pools consist of untouched memory, except for the last page."""
    torch.use_deterministic_algorithms(False)
    layout = CacheLayout(1, 64, side("int8 tensor"), side("int8 tensor"))
    small = chunk_of("int8 tensor", "int8 tensor", 1, 64, [9], [2])
    last = 2**31 // (PAGE_TOKENS * 64)
    arguments = small.arguments
    cache = dict(arguments["cache"])
    for name in ("key_pool", "value_pool"):
        pool = torch.empty(last + 1, 1, PAGE_TOKENS, 64, dtype=torch.int8, device=DEVICE)
        pool[last] = cache[name][small.case.page_table[0, 0]]
        cache[name] = pool
    far = arguments | {"cache": cache, "page_table": torch.full_like(arguments["page_table"], last)}
    near, out = (launch.context_attention(layout, **one, scaling=0.1) for one in (arguments, far))
    assert torch.equal(near, out)
