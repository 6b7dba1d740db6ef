"""The paged pool without an engine: pages, growth, limits, exact rings, windows, shared prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from stages.core.errors import UserError
from stages.engines.paged.pool import PagedPool
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy, KVShape, Window

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4)
FP16 = FP16_POLICY.key
EXACT = KVPolicy(name="exact", key=FP16, value=FP16, sink_tokens=2, recent_tokens=3)
LAST_64 = Window(tokens=64, value=FP16)
WINDOW = KVPolicy(name="window", key=FP16, value=FP16, window=LAST_64)
STREAMING = KVPolicy(name="streaming", key=FP16, value=FP16, eviction=Eviction(window_tokens=128, sink_tokens=64))
FEW_SINKS = KVPolicy(name="few_sinks", key=FP16, value=FP16, eviction=Eviction(window_tokens=128, sink_tokens=70))
SLIDING = KVPolicy(name="sliding", key=FP16, value=FP16, eviction=Eviction(window_tokens=128))


def tokens(first: int, count: int) -> np.ndarray:
    """Return values (1, H, S, D) equal to the token's position."""
    values = np.arange(first, first + count, dtype=np.float16)[:, None]
    return np.broadcast_to(values, (1, 3, count, 4))


def fill(pool: PagedPool, handle: int, count: int) -> None:
    pool.reserve([handle], count)
    pool.append([handle], dict.fromkeys(pool.arrays, tokens(pool.length(handle), count)))


def stored(pool: PagedPool, handle: int, name: str = "value_pool.1", table: str = "page_table") -> list[float]:
    """Return the values of the tokens in a table's pages, read from the last channel of the last head."""
    return pool.arrays[name][pool.tables([handle])[table][0], 2, :, 3].ravel().tolist()


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
    assert pool.array_view("key_pool.0", pool.view([c])[1]).shape == (4, 3, 64, 4)


def test_a_graph_gets_only_the_pages_of_its_batch() -> None:
    pool = PagedPool(WINDOW, SHAPE, 16)
    a, b, c = (pool.start() for _ in range(3))
    for handle, count in ((a, 200), (b, 100), (c, 130)):
        fill(pool, handle, count)
    tables, spans = pool.view([b, c])
    assert (spans.pages, spans.window_pages) == ((4, 9), (2, 6))
    assert np.concatenate([tables["page_table"], tables["window_base_table"]], 1).min() == 0
    for name, table in (("value_pool.1", "window_base_table"), ("window_value_pool.1", "window_table")):
        absolute = pool.arrays[name][pool.tables([b, c])[table]]
        np.testing.assert_array_equal(pool.array_view(name, spans)[tables[table]], absolute)


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


@pytest.mark.parametrize("chunks", [[1] * 300, [63, 1, 65, 128, 43], [260, 40]])
def test_the_window_holds_copies_of_its_pages_only(chunks: list[int]) -> None:
    pool = PagedPool(WINDOW, SHAPE, 8)
    handle = pool.start()
    for count in chunks:
        fill(pool, handle, count)
        length = pool.length(handle)
        tables, first = pool.tables([handle]), LAST_64.first_page(length)
        assert tables["window_starts"].tolist() == [64 * first]
        copies = stored(pool, handle, "window_value_pool.0", "window_table")
        assert copies[: length - 64 * first] == list(range(64 * first, length))
        assert len(tables["window_table"][0]) == len(tables["window_base_table"][0]) == WINDOW.window_pages(length)
    assert stored(pool, handle) == list(range(192))
    assert "window_key_pool.0" not in pool.arrays
    pool.release(handle)
    assert pool.in_use == (0, 0)


@pytest.mark.parametrize("policy", [EXACT, WINDOW], ids=lambda policy: policy.name)
def test_a_fork_copies_only_pages_that_will_be_written(policy: KVPolicy) -> None:
    pool = PagedPool(policy, SHAPE, 4)
    origin = pool.start()
    fill(pool, origin, 130)
    fork = pool.fork(origin)
    assert pool.tables([origin])["lengths"] == pool.tables([fork])["lengths"]
    pool.reserve([fork], 1)
    pool.append([fork], dict.fromkeys(pool.arrays, tokens(-1, 1)))
    fill(pool, origin, 1)
    last = ("value_pool.1", "page_table") if policy is EXACT else ("window_value_pool.1", "window_table")
    position = 130 if policy is EXACT else 130 - 64
    assert (stored(pool, origin, *last)[position], stored(pool, fork, *last)[position]) == (130, -1)
    if policy is EXACT:
        slots = [pool.tables([handle])["exact_slots"][0] for handle in (origin, fork)]
        assert [pool.arrays["key_exact.1"][slot, 0, 2 + 130 % 3, 0] for slot in slots] == [130, -1]
    with pytest.raises(UserError, match="max_pages=4 is too small: 5 pages"):
        pool.fork(fork)
    pool.release(origin)
    assert stored(pool, fork)[:64] == list(range(64))
    pool.release(fork)
    assert pool.in_use == (0, 0)


def kept_positions(policy: KVPolicy, length: int) -> list[int]:
    """Apply the rule token by token. Without an eviction, the sliding layer that sees farthest decides."""
    latest, sinks = (70, 0) if policy.eviction is None else (policy.eviction.window_tokens, policy.eviction.sink_tokens)
    first, sink_pages = max(0, length - latest) // 64, -(-sinks // 64)
    return [position for position in range(length) if position // 64 < sink_pages or position // 64 >= first]


@pytest.mark.parametrize("chunks", [[1] * 500, [63, 1, 65, 128, 43, 200], [10, 480, 10]])
@pytest.mark.parametrize(
    ("policy", "shape"),
    [(STREAMING, SHAPE), (FEW_SINKS, SHAPE), (SLIDING, SHAPE), (FP16_POLICY, replace(SHAPE, windows=(5, 70)))],
    ids=["streaming", "few sinks", "sliding", "sliding layers"],
)
def test_page_tables_list_kept_pages_and_lengths_their_tokens(policy: KVPolicy, shape: KVShape, chunks: list[int]) -> None:
    pool = PagedPool(policy, shape, 16)
    handle = pool.start()
    for count in chunks:
        fill(pool, handle, count)
        positions = kept_positions(policy, pool.length(handle))
        tables = pool.tables([handle])
        assert tables["lengths"].tolist() == [len(positions)]
        assert stored(pool, handle)[: len(positions)] == positions
        assert pool.in_use == (-(-len(positions) // 64), 0)
        assert pool.memory().live_tokens == len(positions)
        first, codes = pool.stored(handle)["value_pool.1"]
        shown = codes.view(np.float16)[2, :, 3]
        assert (first, len(shown)) == (0, pool.length(handle))
        assert shown[positions].tolist() == positions
        assert not shown[sorted(set(range(len(shown))) - set(positions))].any()
    if policy is STREAMING and chunks == [1] * 500:
        assert pool.memory().pool_bytes == 4 * 64 * STREAMING.bytes_per_token(SHAPE) == STREAMING.sequence_bytes(SHAPE, 5001)
    pool.release(handle)
    assert pool.in_use == (0, 0)


@pytest.mark.parametrize("length", [128, 130, 320, 330])
def test_a_shared_page_stays_until_both_sequences_evict_it(length: int) -> None:
    pool = PagedPool(STREAMING, SHAPE, 32)
    origin = pool.start()
    fill(pool, origin, length)
    fork = pool.fork(origin)
    before = kept_positions(STREAMING, length)
    for _ in range(200):
        fill(pool, fork, 1)
        assert stored(pool, origin)[: len(before)] == before
    after = kept_positions(STREAMING, length + 200)
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
        positions = kept_positions(STREAMING, pool.length(handle))
        assert stored(pool, handle)[: len(positions)] == positions
    pool.release(handle)
    assert pool.in_use == (0, 0)
