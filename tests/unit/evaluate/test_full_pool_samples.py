"""The full-pool test on fake engines: noise, deviations, the mixed requests, and the gate's lines."""

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.engines.fake import VOCAB, FakeEngine
from helpers.verdicts.reports import full_pool_line

from stages.core.records import Sample, ServedRequest, no_progress
from stages.engines.interface import ForcedRequest
from stages.evaluate.decoding.full_pool import MIN_LIMIT_KL, fill_pool_with_samples, mixed_requests
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.report import FullPool

ITEMS = [
    EncodedSample(
        Sample(f"sample {i}", "lookup", "", check="exact"), tuple((7 * i + n) % VOCAB for n in range(200 + i)), (1, 0)
    )
    for i in range(120)
]


class FullPoolEngine(FakeEngine):
    """An engine whose logits depend only on the request, plus noise."""

    logit_noise = 0.05
    served_requests: int = 0

    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        return [[self.serve(rows, request, number, pages) for number, request in enumerate(part)] for part in rounds]

    def serve(self, rows: int, request: ForcedRequest, number: int, pages: int | None) -> ServedRequest:  # noqa: ARG002
        self.served_requests += 1
        seed = int(np.dot(np.arange(1, len(request[0]) + 1), request[0]))
        logits = np.random.default_rng(seed).normal(size=(min(4, rows), VOCAB))
        logits += self.logit_noise * np.random.default_rng(self.served_requests).normal(size=logits.shape)
        return ServedRequest(logits.astype(np.float32), preempted=int(pages is not None), reused=64, pages=(3, 5))


def run_full_pool(engine: FakeEngine, count: int) -> FullPool:
    result = fill_pool_with_samples(engine, ITEMS, count, no_progress)
    assert result is not None
    return result


def test_noise_passes_and_changed_logits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integration/evaluate/test_full_pool.py plants faults in a real engine."""
    engine = FullPoolEngine({})
    noisy = run_full_pool(engine, 40)
    assert (noisy.limit_kl or 0) > 10 * MIN_LIMIT_KL, "the noise decides the limit"
    assert full_pool_line(noisy).status == "PASS"
    sound, not_finite = engine.serve, ServedRequest(np.full((4, VOCAB), np.nan, np.float32), 1, 0, ())

    def serve(rows: int, request: ForcedRequest, number: int, pages: int | None) -> ServedRequest:
        if pages is not None and number == 3:
            return not_finite
        tokens, count = request
        return sound(rows, (tokens[:-1] if pages is not None and number == 17 else tokens, count), number, pages)

    monkeypatch.setattr(engine, "serve", serve)
    faulty = run_full_pool(engine, 40)
    assert len(faulty.deviations) == 4, "the fourth and the 18th request of each round"
    assert full_pool_line(faulty).status == "FAIL"
    assert full_pool_line(faulty).reason.count("logits that are not finite") == 2


def test_mixed_requests_share_beginnings_and_decode_at_least_a_page() -> None:
    requests = [request for _, request in mixed_requests(ITEMS, 24, None)]
    assert len({tuple(tokens) for tokens, _ in requests}) == 24
    for (tokens, _), (mixed, _) in zip(requests[:12], requests[12:], strict=True):
        assert tokens[:96] == mixed[:96]
        assert tokens[128:] != mixed[128:]
    assert all(len(tokens) - first >= 64 for tokens, first in requests)
    assert all(len(tokens) < 210 for _, (tokens, _) in mixed_requests(ITEMS, 24, 210))


def test_the_gate_passes_only_a_pool_that_was_full() -> None:
    for result, status, reason in (
        (run_full_pool(FakeEngine({}), 24), "INCONCLUSIVE", "cannot be given a small pool, so it was not tested under load"),
        (FullPool(requests_per_round=24, requests=48), "INCONCLUSIVE", "send more requests with workloads.full_pool=48"),
        (FullPool(requests_per_round=24, requests=48, preempted=3), "PASS", "3 preemptions"),
    ):
        line = full_pool_line(result)
        assert (line.status, reason in line.reason) == (status, True), line.reason
    assert fill_pool_with_samples(FakeEngine({}), ITEMS, 0, no_progress) is None
