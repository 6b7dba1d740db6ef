"""The copy of a token that a row sees: the reference engine's blocks compared with the written rule."""

import numpy as np
import pytest

from stages.engines.reference.attention import BLOCK_BYTES, BLOCK_ROWS, AttentionPiece, Span, plan
from stages.policies.formats import Format
from stages.policies.policy import PAGE_TOKENS, Eviction, KVPolicy, KVShape, Window

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
INT4 = Format(dtype="int4", granularity="per_token", scale="dynamic")
FP16 = Format(dtype="fp16")
SINK, BASE, WINDOW, RECENT, OWN, EVICTED, UNSEEN = range(7)

POLICIES = [
    KVPolicy(name="plain", key=INT4, value=INT4),
    KVPolicy(name="sinks", key=INT4, value=INT4, sink_tokens=70),
    KVPolicy(name="recent", key=INT4, value=INT4, recent_tokens=5),
    KVPolicy(name="window", key=INT4, value=INT4, window=Window(tokens=64, key=FP16)),
    KVPolicy(name="everything", key=INT4, value=INT4, sink_tokens=3, recent_tokens=40, window=Window(tokens=64, value=FP16)),
    KVPolicy(name="nothing_left", key=INT4, value=INT4, sink_tokens=300, recent_tokens=300, window=Window(tokens=64, key=FP16)),
    KVPolicy(name="sliding", key=INT4, value=INT4, eviction=Eviction(window_tokens=64)),
    KVPolicy(name="streaming", key=INT4, value=INT4, eviction=Eviction(window_tokens=128, sink_tokens=64)),
    KVPolicy(name="all_at_once", key=INT4, value=INT4, sink_tokens=4, recent_tokens=32, window=Window(tokens=64, key=FP16),
             eviction=Eviction(window_tokens=64, sink_tokens=64)),
]  # fmt: skip
SPANS = [
    [Span(0, 200, 0)],
    [Span(200, 330, 200)],
    [Span(129, 130, None)],
    [Span(0, 50, 0), Span(50, 100, 50), Span(100, 101, 100), Span(101, 330, None)],
    [Span(0, 1, 0), Span(1, 300, None)],
]

SLIDES = (None, 7, 70, 1, None, 1000, 70, None, 7)
"""Sliding windows of a policy's layers."""


def source(policy: KVPolicy, slide: int | None, windowed: bool, start: int, row: int, position: int) -> int:
    """Apply the rule to one position."""
    if position > row:
        return UNSEEN
    beyond = slide is not None and position <= row - slide  # as in transformers.masking_utils.sliding_window_overlay
    if beyond or (position < start and position // PAGE_TOKENS in policy.evicted_pages(start, SHAPE)):
        return EVICTED
    if position >= start:
        return OWN
    if position < policy.sink_tokens or position >= start - policy.recent_tokens:
        return SINK if position < policy.sink_tokens else RECENT
    if windowed and policy.window and position // PAGE_TOKENS >= policy.window.first_page(start):
        return WINDOW
    return BASE


def painted(pieces: tuple[AttentionPiece, ...], rows: int, columns: int) -> np.ndarray:
    """Return the source of every (row, column). Asserts that no two pieces claim the same place."""
    seen = np.full((rows, columns), UNSEEN)
    for piece in pieces:
        mask = np.ones((rows, piece.high - piece.low), bool) if piece.mask_RT is None else piece.mask_RT.numpy()
        part = seen[:, piece.low : piece.high]
        assert (part[mask] == UNSEEN).all()
        part[mask] = piece.source
    return seen


@pytest.mark.parametrize("spans", SPANS, ids=lambda spans: "-".join(str(span.end) for span in spans))
@pytest.mark.parametrize("number", range(len(POLICIES)), ids=lambda number: POLICIES[number].name)
def test_every_row_sees_every_token_once_and_from_the_copy_that_the_policy_says(number: int, spans: list[Span]) -> None:
    policy, slide = POLICIES[number], SLIDES[number]
    covered: list[int] = []
    for block in plan(policy, spans, row_bytes=1, slides={slide}):
        covered += range(block.begin, block.end)
        span = next(span for span in spans if span.begin <= block.begin < span.end)
        assert set(block.pieces) == {(slide, False)} | ({(slide, True)} if policy.window else set())
        for (_, windowed), pieces in block.pieces.items():
            expected = [
                [source(policy, slide, windowed, row if span.start is None else span.start, row, position)
                 for position in range(block.end)]
                for row in range(block.begin, block.end)
            ]  # fmt: skip
            np.testing.assert_array_equal(painted(pieces, block.end - block.begin, block.end), expected)
    assert covered == list(range(spans[0].begin, spans[-1].end))


def test_the_scores_of_a_block_are_bounded_however_long_the_context() -> None:
    for row_bytes in (100, 1 << 19, 1 << 22):
        blocks = plan(POLICIES[0], [Span(0, 1000, 0)], row_bytes)
        rows = max(block.end - block.begin for block in blocks)
        assert rows == min(BLOCK_ROWS, BLOCK_BYTES // row_bytes)
    assert max(block.end - block.begin for block in plan(POLICIES[0], [Span(0, 9, 0)], 2 * BLOCK_BYTES)) == 1
