"""What holds for any placement of pages and any place of a bad number, on both engines.

Bit for bit: a page's number, and who else reads it, must not touch a single logit.
"""

import heapq
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_fixtures import BY_NAME, make_engine

from stages.engines.onnx.engine import OnnxEngine
from stages.engines.paged.allocator import PageAllocator
from stages.engines.paged.pool import PagedPool

torch.set_num_threads(1)
examples = settings(max_examples=6, derandomize=True, deadline=None, database=None)

NAMES = ("fp8", "int4_g32_asym_hadamard", "window_of_keys_and_values", "ages", "evicted_ages")
"""Static and dynamic scales, zeros, both sides of a window, sinks and recent tokens, pages that are evicted."""

VOCABULARY = 256
STEPS = 3

EngineOf = Callable[[str], OnnxEngine]
tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=STEPS, max_size=STEPS)
lengths = st.integers(1, 200)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def engine_of(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: make_engine(decoder, folder / name, BY_NAME[name], prefill_chunk=128))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return tokens


def decoded(engine: OnnxEngine, handle: int, fed: list[int]) -> np.ndarray:
    return np.array([engine.decode([handle], [token])[0] for token in fed])


def alone(engine: OnnxEngine, prompt: list[int], fed: list[int]) -> np.ndarray:
    (handle,), _ = engine.prefill([prompt])
    logits = decoded(engine, handle, fed)
    engine.release([handle])
    return logits


def renumber(pool: PagedPool, allocator: PageAllocator, seed: int) -> None:
    """Move every page of a kind to another number, as if they had been handed out in another order."""
    order = np.random.default_rng(seed).permutation(allocator.capacity).tolist()
    for array in pool._numbered_by(allocator):
        array[order] = array.copy()
    allocator._users = {order[page]: users for page, users in allocator._users.items()}
    allocator._free = [order[page] for page in allocator._free]
    heapq.heapify(allocator._free)
    for row in pool.sequences.values():
        held = row.pages if allocator is pool.pages else row.window_pages
        held[:] = [order[page] for page in held]


@pytest.mark.parametrize("name", NAMES)
@examples
@given(length=lengths, fed=tokens, seed=seeds)
def test_any_permutation_of_page_numbers_gives_the_same_logits(
    name: str, length: int, fed: list[int], seed: int, engine_of: EngineOf
) -> None:
    engine, prompt = engine_of(name), prompt_of(length)
    expected = alone(engine, prompt, fed)
    (handle, other), _ = engine.prefill([prompt, prompt_of(150, seed)])
    for allocator in (engine.pool.pages, engine.pool.window_pages):
        renumber(engine.pool, allocator, seed)
    try:
        np.testing.assert_array_equal(decoded(engine, handle, fed), expected)
    finally:
        engine.release([handle, other])
