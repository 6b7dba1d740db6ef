"""Sizes of plans with tensors too large for TensorRT's layers."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from stages.core.errors import UserError
from stages.engines.tensorrt.shapes import (
    MOST_ELEMENTS,
    MOST_SHARED_ELEMENTS,
    PlanLimits,
    bucket,
    check_extents,
    plan_run,
    prefill_rows,
)
from stages.policies.policy import FP16_POLICY, KVShape

LLAMA = KVShape(layers=2, kv_heads=8, head_dim=128)
Q_HEADS = 32


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(64, 32_704), (63, 32_768), (1, 64_448), (64, 32_768)])
def test_a_pool_of_2_31_elements_is_one_too_many(max_batch: int, max_tokens: int) -> None:
    """The limit is reached by 64 sequences of 32,768 tokens with 8 heads of 128 channels."""
    too_many = max_batch * max_tokens * 8 * 128 > MOST_ELEMENTS
    expected = r"^backend\.max_batch=64, backend\.max_tokens=32768: .* 2,147,483,648 elements, .*; lower one"
    with pytest.raises(UserError, match=expected) if too_many else nullcontext():
        check_extents(FP16_POLICY, LLAMA, Q_HEADS, range(2), max_batch=max_batch, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("max_batch", "max_tokens", "native", "rows"),
    [
        (64, 1 << 20, False, 4),
        (3, 1024, False, 3),
        (64, 1024, True, 4),
        (64, 3072, True, 4),
        (64, 3136, True, 3),
        (64, 8192, True, 1),
        (1, 1024, True, 1),
    ],
)
def test_as_many_prompts_prefill_together_as_function_bodies_have_room_for(
    max_batch: int, max_tokens: int, native: bool, rows: int
) -> None:
    limits = PlanLimits(FP16_POLICY, max_batch, max_tokens)
    assert prefill_rows(limits, Q_HEADS, native=native) == rows
    assert replace(limits, prefill_rows=rows).ranges("prefill")["B"].largest == rows
    assert limits.ranges("decode")["B"].largest == max_batch
    if native and rows > 1:
        shared, more = (replace(limits, prefill_rows=n) for n in (rows, rows + 1))
        chunk = shared.chunk
        positions = 64 * shared.sequence_pages + chunk
        assert rows * Q_HEADS * chunk * positions <= MOST_SHARED_ELEMENTS
        assert rows == min(4, max_batch) or more.prefill_rows * Q_HEADS * chunk * positions > MOST_SHARED_ELEMENTS


def test_prompts_are_cut_as_if_alone_and_run_with_those_of_their_bucket() -> None:
    lengths, chunk, rows = [5, 1500, 1024, 7, 600, 513, 2100, 1], 1024, 4
    done, runs = [0] * len(lengths), []
    while any(left := [length - stored for length, stored in zip(lengths, done, strict=True)]):
        run = plan_run(left, chunk, rows)
        runs.append(run)
        assert len(run) <= rows
        assert len({bucket(size, chunk) for _, size in run}) == 1
        for i, size in run:
            assert size == min(chunk, lengths[i] - done[i])
            done[i] += size
    assert done == lengths
    assert runs[0] == [(0, 5), (3, 7)]
    assert runs[1] == [(1, 1024), (2, 1024), (4, 600), (5, 513)]
    assert len(runs) < len(lengths)
