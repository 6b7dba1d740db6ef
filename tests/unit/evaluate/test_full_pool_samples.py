"""Requests in a full pool compared with the same requests with room: relevant differences, and the gate's lines."""

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.engines.fake import VOCAB, FakeEngine
from helpers.verdicts.reports import full_pool_line

from stages.core.records import Sample, ServedRequest, no_progress
from stages.engines.interface import ForcedRequest
from stages.evaluate.decoding.full_pool import MIN_LIMIT_KL, fill_pool_with_samples, mixed_requests
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.engine_tests import FullPool

ITEMS = [
    EncodedSample(
        Sample(f"sample {i}", "lookup", "", check="exact"), tuple((7 * i + n) % VOCAB for n in range(200 + i)), (1, 0)
    )
    for i in range(120)
]


class FullPoolEngine(FakeEngine):
    """An engine whose rows depend only on the request, with noise."""

    noise_of_rounds = 0.05
    asked: int = 0

    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        return [[self.served(rows, request, number, pages) for number, request in enumerate(part)] for part in rounds]

    def served(self, rows: int, request: ForcedRequest, number: int, pages: int | None) -> ServedRequest:  # noqa: ARG002
        self.asked += 1
        seed = int(np.dot(np.arange(1, len(request[0]) + 1), request[0]))
        logits = np.random.default_rng(seed).normal(size=(min(4, rows), VOCAB))
        logits += self.noise_of_rounds * np.random.default_rng(self.asked).normal(size=logits.shape)
        return ServedRequest(logits.astype(np.float32), preempted=int(pages is not None), reused=64, pages=(3, 5))


def measured(engine: FakeEngine, count: int) -> FullPool:
    found = fill_pool_with_samples(engine, ITEMS, count, no_progress)
    assert found is not None
    return found


def test_noise_is_no_deviation_but_other_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integration/evaluate/test_full_pool.py plants faults in a real engine."""
    engine = FullPoolEngine({})
    found = measured(engine, 40)
    assert (found.limit_kl or 0) > 10 * MIN_LIMIT_KL, "the noise decides the limit"
    assert full_pool_line(found).status == "PASS"
    sound, broken = engine.served, ServedRequest(np.full((4, VOCAB), np.nan, np.float32), 1, 0, ())

    def served(rows: int, request: ForcedRequest, number: int, pages: int | None) -> ServedRequest:
        if pages is not None and number == 3:
            return broken
        tokens, count = request
        return sound(rows, (tokens[:-1] if pages is not None and number == 17 else tokens, count), number, pages)

    monkeypatch.setattr(engine, "served", served)
    found = measured(engine, 40)
    assert len(found.deviations) == 4, "the fourth and the 18th request of each order"
    assert full_pool_line(found).status == "FAIL"
    assert full_pool_line(found).reason.count("logits that are not finite") == 2


def test_requests_share_beginnings_and_decode_at_least_a_page() -> None:
    named = list(mixed_requests(ITEMS, 24, None))
    tokens = [request[0] for _, request in named]
    assert len({tuple(one) for one in tokens}) == 24
    for one, other in zip(tokens[:12], tokens[12:], strict=True):
        assert one[:96] == other[:96]
        assert one[128:] != other[128:]
    assert all(len(one) - first >= 64 for _, (one, first) in named)
    assert all(len(one) < 210 for _, (one, _) in mixed_requests(ITEMS, 24, 210))


def test_the_gate_passes_only_a_pool_that_was_full() -> None:
    for found, status, says in (
        (measured(FakeEngine({}), 24), "INCONCLUSIVE", "cannot be given a small pool, so it was not tested under load"),
        (FullPool(requests_per_round=24, requests=48), "INCONCLUSIVE", "send more requests with workloads.full_pool=48"),
        (FullPool(requests_per_round=24, requests=48, preempted=3), "PASS", "so that at most 12 % of requests change"),
    ):
        line = full_pool_line(found)
        assert (line.status, says in line.reason) == (status, True), line.reason
    assert fill_pool_with_samples(FakeEngine({}), ITEMS, 0, no_progress) is None
