"""The paged pool without an engine: growth and its limit, a shared page that is evicted, and failed steps."""

import numpy as np
import pytest

from stages.core.errors import UserError
from stages.engines.paged.pool import PagedPool
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy, KVShape

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4)
FP16 = FP16_POLICY.key
STREAMING = KVPolicy(name="streaming", key=FP16, value=FP16, eviction=Eviction(window_tokens=128, sink_tokens=64))


def tokens(first: int, count: int) -> np.ndarray:
    """Return values (1, H, S, D) equal to the token's position."""
    values = np.arange(first, first + count, dtype=np.float16)[:, None]
    return np.broadcast_to(values, (1, 3, count, 4))


def fill(pool: PagedPool, handle: int, count: int) -> None:
    pool.reserve([handle], count)
    pool.append([handle], dict.fromkeys(pool.arrays, tokens(pool.length(handle), count)))


def stored(pool: PagedPool, handle: int) -> list[float]:
    """Return the values of the tokens in a sequence's pages, read from the last channel of the last head."""
    return pool.arrays["value_pool.1"][pool.tables([handle])["page_table"][0], 2, :, 3].ravel().tolist()


def test_growth_keeps_stored_tokens_within_the_limit() -> None:
    pool = PagedPool(FP16_POLICY, SHAPE, 5)
    handle = pool.start()
    sizes, spans = [], set()
    for _ in range(5):
        fill(pool, handle, 64)
        sizes.append(pool.memory().pages)
        spans.add(pool.view([handle])[1])
    assert sizes == [1, 2, 4, 4, 5]
    assert len(spans) == 5, "after growth a graph must bind the arrays again"
    assert stored(pool, handle) == list(range(320))
    with pytest.raises(UserError, match="max_pages=5 is too small: 6 pages of 64 tokens"):
        pool.reserve([handle], 1)
    assert pool.memory().pool_bytes == FP16_POLICY.pool_bytes(SHAPE, 5)
    pool.release(handle)
    a, b = pool.start(), pool.start()
    with pytest.raises(UserError, match="6 pages"):
        pool.reserve([a, b], 129)
    pool.reserve([a], 320)  # the refused batch took no page


def kept_positions(length: int) -> list[int]:
    """Apply the rule of STREAMING token by token."""
    first = max(0, length - 128) // 64
    return [position for position in range(length) if position < 64 or position >= 64 * first]


@pytest.mark.parametrize("length", [128, 130, 320, 330])
def test_a_shared_page_stays_until_both_sequences_evict_it(length: int) -> None:
    pool = PagedPool(STREAMING, SHAPE, 32)
    origin = pool.start()
    fill(pool, origin, length)
    fork = pool.fork(origin)
    before = kept_positions(length)
    for _ in range(200):
        fill(pool, fork, 1)
        assert stored(pool, origin)[: len(before)] == before
    after = kept_positions(length + 200)
    assert stored(pool, fork)[: len(after)] == after
    pool.release(origin)
    assert pool.in_use == (-(-len(after) // 64), 0)
    assert stored(pool, fork)[: len(after)] == after


def test_pages_of_a_failed_step_serve_the_next_step() -> None:
    pool = PagedPool(STREAMING, SHAPE, 16)
    handle = pool.start()
    fill(pool, handle, 260)
    for tokens_of_a_failed_step in (1000, 1):
        pool.reserve([handle], tokens_of_a_failed_step)
    for count in (1, 70, 1, 300):
        fill(pool, handle, count)
        positions = kept_positions(pool.length(handle))
        assert stored(pool, handle)[: len(positions)] == positions
    pool.release(handle)
    assert pool.in_use == (0, 0)
