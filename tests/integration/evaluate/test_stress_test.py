"""The stress test on real engines: sound engines pass, and the test keeps to its seed, share and limits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.hooks import logits
from faults.library import BY_NAME as FAULTS
from helpers.engines.random_llama import BY_NAME, make_bundle, make_engine, make_reference
from helpers.registry.judged_engine import config_of

from stages.core.records import no_progress
from stages.engines.backend import ROUNDING
from stages.engines.onnx.engine import load_engine
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.replay import disturb_layers
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.operations import StressTest
from stages.evaluate.conformance.scenarios import SCENARIOS, ragged
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.report import StressResult
from stages.workloads.config import MIN_SHARE, StressTestConfig

SMALL = StressTestConfig(max_tokens=192, decode_steps=72, offset_steps=4, max_batch=6, requests=8, seed=0)
LATER = SMALL.model_copy(update={"max_tokens": 704, "max_batch": 8})
FAR = StressTestConfig(max_tokens=1152, decode_steps=400, offset_steps=8, max_batch=20, requests=40, seed=0)

Limit = Callable[..., None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """A function that limits the stress test to the named scenarios."""

    def limited(*names: str) -> None:
        chosen = {run: needs for run, needs in SCENARIOS.items() if run.__name__ in names}
        assert len(chosen) == len(names)
        monkeypatch.setattr(stress_test, "SCENARIOS", chosen)

    return limited


@pytest.fixture(scope="module")
def reference(model: Any) -> ReferenceEngine:
    """The reference engine for int8."""
    return ReferenceEngine(TorchEngine.from_model(model, BY_NAME["int8"]))


@pytest.mark.parametrize(("name", "attention"), [("int8", "graph"), ("evicted_ages", "native")])
def test_a_sound_onnx_engine_passes(name: str, attention: Any, model: Any, decoder: Path, tmp_path: Path) -> None:
    engine, progress = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], attention=attention), list[tuple[int, int]]()
    result = run_stress_test(
        engine,
        ReferenceEngine(make_reference(model, BY_NAME[name], engine.shape)),
        SMALL,
        4,
        150,
        lambda _, *amounts: progress.append(amounts),
    )
    (_, announced), (computed, last) = progress[0], progress[-1]
    assert 0.7 < computed / announced < 1.4, "the announced number of tokens"
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert computed <= last
    assert result.failures == []
    assert result.allocation == ""
    assert (result.tokens, result.batch, result.page_offsets) == (192, 6, PAGE_TOKENS)
    assert result.forks > 6
    assert result.requests > SMALL.requests
    assert engine.pool.in_use == (0, 0)


def test_a_page_that_leaves_too_early_for_a_fork_or_is_never_free_again_is_caught(
    model: Any, decoder: Path, tmp_path: Path, limit: Limit
) -> None:
    limit("evicted_fork")
    bundle = make_bundle(decoder, tmp_path / "bundle", BY_NAME["streaming"])
    long = SMALL.model_copy(update={"max_tokens": 320})
    faults = {"evicted_under_a_fork": "of an origin that evicted", "evicted_never_freed": "pages stayed in the cache"}
    for name, message in {"": "", **faults}.items():
        engine = load_engine(bundle, threads=1)
        if name:
            FAULTS[name].plant(engine)
        reference = ReferenceEngine(make_reference(model, BY_NAME["streaming"], engine.shape))
        failures = run_stress_test(engine, reference, long, 4, 150, no_progress).failures
        assert any(message in failure for failure in failures) is bool(name), failures


def test_an_engine_that_rounds_queries_is_allowed_another_code_of_a_query(model: Any) -> None:
    """Without this allowance, four of ten runs of llama.cpp's types failed, because no engine shows its rounded queries."""
    rounded, exact = (TorchEngine.from_model(model, config_of(f"kv={name}").kv) for name in ("llamacpp_q8_0", "int8"))
    assert ReferenceEngine(rounded, None).rounding == ROUNDING["float16"] > ReferenceEngine(exact, None).rounding


def test_a_turn_comes_first_after_the_longest_comparison(
    int8: Path, reference: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = load_engine(int8, threads=1), list[str]()

    def noting(name: str, sound: Callable[..., Any], *given: Any) -> Any:
        calls.append(name)
        return sound(*given)

    monkeypatch.setattr(stress_test, "SCENARIOS", {lambda _: None: ()})
    for name in ("extend", "_decode"):
        monkeypatch.setattr(engine, name, partial(noting, name, getattr(engine, name)))
    for seed in range(4):
        calls.clear()
        result = run_stress_test(engine, reference, SMALL.model_copy(update={"seed": seed, "requests": 1}), 4, 150, no_progress)
        assert result.failures == []
        assert calls[0] == "extend"


@pytest.mark.parametrize(
    ("rounding", "failure"), [(2.0**-9, None), (2.0**-7, "generate: one of several prompts in one call: first stored wrong")]
)
def test_free_answers_are_checked_over_the_codes_that_the_engine_stored(
    rounding: float, failure: str | None, model: Any, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If codes of `generate` are rounded to their neighbours, other answers may follow from them. Wrong codes are a fault."""
    limit("answers")
    engine, reference = (TorchEngine.from_model(model, BY_NAME["int4_g32"]) for _ in range(2))
    generate = engine.generate

    def disturbed(*given: Any, **options: Any) -> Any:
        with disturb_layers(model, rounding):
            return generate(*given, **options)

    monkeypatch.setattr(engine, "generate", disturbed)
    failures = run_stress_test(engine, ReferenceEngine(reference), LATER, 4, 150, no_progress).failures
    assert failures == [] if failure is None else any(failure in text for text in failures), failures


def test_another_run_draws_another_seed_and_says_which(int8: Path, reference: ReferenceEngine, limit: Limit) -> None:
    limit("equal")
    brief = StressTestConfig(max_tokens=128, decode_steps=8, offset_steps=1, max_batch=2, requests=1)
    engine = load_engine(int8, threads=1)
    drawn = [run_stress_test(engine, reference, brief, 2, 100, no_progress, asked=asked) for asked in (None, 1)]
    assert drawn[0].seed != drawn[1].seed
    assert [result.share for result in drawn] == [1.0, MIN_SHARE]
    assert run_stress_test(engine, reference, brief.model_copy(update={"seed": 7}), 2, 100, no_progress).seed == 7


def test_the_shortest_test_passes_a_sound_engine_and_fails_a_full_pool_that_loses_a_page(
    int8: Path, reference: ReferenceEngine, limit: Limit
) -> None:
    limit("walk", "batch", "answers", "full_pool")
    engine = load_engine(int8, threads=1)
    result = run_stress_test(engine, reference, LATER, 4, 150, no_progress, asked=1)
    assert (result.share, result.failures, result.preempted > 0) == (MIN_SHARE, [], True)
    limit("full_pool")
    FAULTS["full_pool_wipes_a_page"].plant(engine)
    failures = run_stress_test(engine, reference, LATER, 4, 150, no_progress, asked=1).failures
    assert any(failure.startswith("full pool: request") for failure in failures), failures


def test_an_engine_that_repeats_itself_up_to_noise_passes(int8: Path, reference: ReferenceEngine, limit: Limit) -> None:
    limit("full_pool", "crowd", "wear")
    engine, rng = load_engine(int8, threads=1), np.random.default_rng(0)
    logits(lambda x, _: (x + rng.uniform(-1e-6, 1e-6, x.shape)).astype(np.float32))(engine)
    assert run_stress_test(engine, reference, SMALL, 4, 150, no_progress).failures == []


def test_decode_steps_reach_most_lengths_up_to_the_longest_sample(int8: Path, reference: ReferenceEngine) -> None:
    test = StressTest(SequenceComparer(load_engine(int8, threads=1), reference), FAR, FAR.max_tokens, 20, 900)
    lengths = {len(row.prompt) + step for row in ragged(test) for step in range(len(row.ahead))}
    assert len(lengths & set(range(1, 900))) > 750


def test_the_stress_test_goes_no_further_than_the_engine_was_built_for(
    int8: Path, reference: ReferenceEngine, limit: Limit
) -> None:
    limit("batch", "walk", "crowd")
    engine: Any = load_engine(int8, threads=1)
    engine.max_tokens, engine.max_batch, engine.max_sequences = 128, 3, 3
    result: StressResult = run_stress_test(engine, reference, SMALL, 16, 700, no_progress)
    assert result.failures == []
    assert (result.tokens, result.batch) == (128, 3)
