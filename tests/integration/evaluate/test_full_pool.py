"""The full-pool test on ONNX engines: sound engines answer as in a large pool; faults in waiting or preemption fail."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.hooks import Plant, method
from faults.library import BY_NAME as FAULTS
from helpers.engines.random_llama import BY_NAME, make_engine
from helpers.verdicts.reports import full_pool_line

from stages.core.errors import UserError
from stages.core.records import Sample, no_progress
from stages.evaluate.decoding.full_pool import fill_pool_with_samples
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import KVPolicy

REQUESTS = 16


def samples() -> list[EncodedSample]:
    """Return eight documents of three pages."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 256, count).tolist())

    return [EncodedSample(Sample(f"sample {i}", "lookup", ""), tokens(200 + 5 * i), tokens(5 + i)) for i in range(8)]


@pytest.mark.parametrize("policy", [BY_NAME[name] for name in ("ages", "streaming")], ids=lambda policy: policy.name)
def test_a_sound_engine_gives_the_same_answers_in_a_full_pool(policy: KVPolicy, decoder: Path, tmp_path: Path) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", policy)
    chunk, most = engine.prefill_chunk, engine.pool.max_pages
    result = fill_pool_with_samples(engine, samples(), REQUESTS, no_progress)
    assert result is not None
    assert engine.pool.in_use == (0, 0)
    assert not result.deviations, result.deviations[0]
    assert result.requests == 2 * REQUESTS
    assert result.pages < result.wanted_pages // 2
    assert result.preempted > 0
    assert (engine.prefill_chunk, engine.pool.max_pages) == (chunk, most)


def resumed_a_token_late(prefill: Any, _: Any, joining: Any) -> Any:
    """Resume a preempted request one token too late."""
    logits = prefill(joining)
    for request in joining:
        request.stored += request.preempted > 0
    return logits


@pytest.mark.parametrize(
    ("plant", "description"),
    [
        (FAULTS["full_pool_wipes_a_page"].plant, r"held pages \d+, \d+, \d+"),
        (method("_prefill_requests", resumed_a_token_late), r"preempted [1-9]"),
    ],
)
def test_a_fault_in_a_full_pool_fails_and_describes_the_requests(
    plant: Plant, description: str, decoder: Path, tmp_path: Path
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME["fp8"])
    plant(engine)
    result = fill_pool_with_samples(engine, samples(), REQUESTS, no_progress)
    assert result is not None
    assert 0 < len(result.deviations) < result.requests
    assert all(re.search(description, text) for text in result.deviations)
    line = full_pool_line(result)
    assert line.status == "FAIL"
    assert f"{len(result.deviations)} of 32 requests differ" in line.reason
    assert result.deviations[0] in line.reason


def test_generate_in_a_small_pool_gives_the_answers_of_single_requests(decoder: Path, tmp_path: Path) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME["int4"], max_pages=5)
    prompts = [list(item.prompt[:length]) for item, length in zip(samples(), (130, 60, 63, 126, 190, 1), strict=False)]
    alone = [engine.generate([prompt], 70, ())[0] for prompt in prompts]
    assert engine.generate(prompts, 70, ()) == alone
    assert engine.pool.in_use == (0, 0)


def test_a_request_larger_than_the_pool_is_refused(decoder: Path, tmp_path: Path) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME["int4"], max_pages=3)
    for prompts in ([[1] * 193], [[1] * 10, [1] * 190]):
        with pytest.raises(UserError, match="max_pages=3 is too small: 4 pages"):
            engine.generate(prompts, 70, ())
        assert engine.pool.in_use == (0, 0)
