"""Sizes of plans whose tensors TensorRT's layers cannot address."""

from dataclasses import replace

import pytest

from pipeline.core.errors import UserError
from pipeline.core.kv import FP16_POLICY, KVShape
from stages.engines.tensorrt.shapes import (
    MOST_ELEMENTS,
    MOST_SHARED_ELEMENTS,
    Limits,
    bucket,
    check_extents,
    largest,
    plan_run,
    prefill_rows,
)

LLAMA = KVShape(layers=2, kv_heads=8, head_dim=128)
Q_HEADS = 32


def refused(max_batch: int, max_tokens: int, layers: range = range(2)) -> str:
    """Return the refusal, empty where the sizes are taken."""
    try:
        check_extents(FP16_POLICY, LLAMA, Q_HEADS, layers, max_batch=max_batch, max_tokens=max_tokens)
    except UserError as error:
        return str(error)
    return ""


def test_a_pool_of_exactly_2_31_elements_is_one_too_many() -> None:
    """64 sequences of 32,768 tokens, 8 heads of 128 channels."""
    assert largest(Limits(FP16_POLICY, 64, 32_768), LLAMA, Q_HEADS, 0)[0] == MOST_ELEMENTS + 1
    message = refused(64, 32_768)
    assert message.startswith("backend.max_batch=64, backend.max_tokens=32768: of kv=fp16 the key pool of layer 0")
    assert "2,147,483,648 elements" in message
    assert message.endswith("set at most backend.max_tokens=32704 or backend.max_batch=63")


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(64, 32_704), (63, 32_768), (1, 64_448)])
def test_sizes_that_a_refusal_proposes_are_taken(max_batch: int, max_tokens: int) -> None:
    assert refused(max_batch, max_tokens) == ""


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
    limits = Limits(FP16_POLICY, max_batch, max_tokens)
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
