"""The paged pool without an engine: pages, growth, limits, exact rings."""

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.kv import FP16_POLICY, KVPolicy, KVShape
from stages.onnx.pool import PagedPool

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4)
WINDOW = KVPolicy(name="window", key=FP16_POLICY.key, value=FP16_POLICY.value, sink_tokens=2, recent_tokens=3)


def tokens(first: int, count: int, batch: int = 1) -> np.ndarray:
    """Values (L, B, H, S, D) whose number is the token's position."""
    values = np.arange(first, first + count, dtype=np.float16)[:, None]
    return np.broadcast_to(values, (2, batch, 3, count, 4))


def fill(pool: PagedPool, handle: int, count: int) -> None:
    pool.reserve([handle], count)
    new = tokens(pool.length(handle), count)
    pool.append_tokens(handle, dict.fromkeys(pool.arrays, new))


def test_pages_are_taken_lowest_first_and_reused_after_release() -> None:
    pool = PagedPool(FP16_POLICY, SHAPE, 8)
    a, b = pool.start(), pool.start()
    fill(pool, a, 65)
    fill(pool, b, 64)
    assert pool.tables([a, b])["page_table"].tolist() == [[0, 1], [2, 0]]
    pool.release(a)
    c = pool.start()
    fill(pool, c, 130)
    assert pool.tables([c])["page_table"].tolist() == [[0, 1, 3]]
    assert pool.bound_pages == 4


def test_growth_keeps_what_is_stored_and_stays_within_the_limit() -> None:
    pool = PagedPool(FP16_POLICY, SHAPE, 5)
    handle = pool.start()
    sizes = []
    for _ in range(5):
        fill(pool, handle, 64)
        sizes.append(pool.memory(0).pages)
    assert sizes == [1, 2, 4, 4, 5]
    stored = pool.arrays["key_pool"][:, pool.tables([handle])["page_table"][0]]
    np.testing.assert_array_equal(stored[1, :, 2, :, 3].ravel(), np.arange(320))
    with pytest.raises(UserError, match="max_pages=5 is too small: 6 pages of 64 tokens"):
        pool.reserve([handle], 1)
    assert pool.memory(0).pool_bytes == FP16_POLICY.pool_bytes(SHAPE, 5)


def test_a_batch_that_does_not_fit_gets_no_page_at_all() -> None:
    pool = PagedPool(FP16_POLICY, SHAPE, 3)
    a, b = pool.start(), pool.start()
    with pytest.raises(UserError, match="4 pages"):
        pool.reserve([a, b], 65)
    pool.reserve([a], 192)


@pytest.mark.parametrize("chunks", [[1] * 11, [11], [1, 4, 6], [7, 1, 1, 1, 1]])
def test_exact_buffers_hold_the_sinks_and_the_newest_token_of_each_residue(chunks: list[int]) -> None:
    pool = PagedPool(WINDOW, SHAPE, 4)
    pool.start()
    handle = pool.start()
    for count in chunks:
        fill(pool, handle, count)
    slot = pool.tables([handle])["exact_slots"][0]
    assert slot == 1
    # Eleven tokens: 8, 9 and 10 lie at 8 % 3, 9 % 3 and 10 % 3.
    assert pool.arrays["value_exact"][0, slot, 1, :, 0].tolist() == [0, 1, 9, 10, 8]


def test_a_step_of_a_batch_stores_what_single_appends_store() -> None:
    pool, other = PagedPool(WINDOW, SHAPE, 8), PagedPool(WINDOW, SHAPE, 8)
    for each in (pool, other):
        for length in (3, 64):
            fill(each, each.start(), length)
    pool.reserve([0, 1], 1)
    new = np.concatenate([tokens(3, 1), tokens(64, 1)], axis=1)
    pool.append_step([0, 1], dict.fromkeys(pool.arrays, new))
    for handle in (0, 1):
        fill(other, handle, 1)
    for name in pool.arrays:
        np.testing.assert_array_equal(pool.arrays[name], other.arrays[name])
    assert pool.memory(0) == other.memory(0)
    assert pool.memory(0).exact_bytes == WINDOW.exact_bytes(SHAPE, 2)
