"""The stress test on real engines: sound engines pass, and an injected fault is named by the scenario that covers it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.hooks import logits
from faults.library import BY_NAME as FAULTS
from helpers.engines.random_llama import BY_NAME, make_bundle, make_engine, make_reference
from helpers.registry.judged_engine import config_of
from helpers.stride import STRIDE

from stages.core.records import no_progress
from stages.engines.backend import ROUNDING
from stages.engines.onnx.engine import load_engine
from stages.engines.onnx.native.compiler import find_compiler
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.replay import disturb_layers
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.operations import StressTest
from stages.evaluate.conformance.scenarios import SCENARIOS, ragged
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import PAGE_TOKENS, KVShape
from stages.verdict.report import StressResult
from stages.workloads.config import MIN_SHARE, StressTestConfig

SMALL = StressTestConfig(max_tokens=192, decode_steps=72, offset_steps=4, max_batch=6, requests=8, seed=0)
LATER = SMALL.model_copy(update={"max_tokens": 704, "max_batch": 8})
WIDE = SMALL.model_copy(update={"max_batch": 20})
FAR = StressTestConfig(max_tokens=1152, decode_steps=400, offset_steps=8, max_batch=20, requests=40, seed=0)
CROWDED = StressTestConfig(max_tokens=1024, decode_steps=8, offset_steps=1, max_batch=32, requests=1, seed=0)
SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)

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


def test_after_each_pause_a_prompt_a_step_or_a_turn_comes_first(
    int8: Path, reference: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls, compare = load_engine(int8, threads=1), list[str](), StressTest.compare

    def noting(name: str, sound: Callable[..., Any], *given: Any) -> Any:
        calls.append(name)
        return sound(*given)

    scenarios = [lambda _: None, lambda test: test.serve([test.sequence("a prompt", 1, 1)])]
    monkeypatch.setattr(stress_test, "SCENARIOS", dict.fromkeys(scenarios, ()))
    monkeypatch.setattr(StressTest, "compare", lambda *given: noting("pause", compare, *given))
    monkeypatch.setattr("time.sleep", lambda _: calls.append("pause"))
    for name in ("extend", "_decode", "_prefill_batch"):
        monkeypatch.setattr(engine, name, partial(noting, name, getattr(engine, name)))
    result = run_stress_test(engine, reference, SMALL.model_copy(update={"requests": 1}), 4, 150, no_progress)
    assert result.failures == []
    followers = [after for before, after in pairwise(calls) if before == "pause" != after]
    assert followers == ["_prefill_batch", "_prefill_batch", "_decode", "extend"]


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


# --- injected faults ---


Situation = tuple[str, str, StressTestConfig, str]


def at(scenario: str, config: StressTestConfig = CROWDED, policy: str = "int8", says: str = "", **changes: int) -> Situation:
    """Return the scenario that must name a fault, the engine's policy, `config` with changes, and a part of the message."""
    return scenario, policy, config.model_copy(update=changes), says


NAMED = {
    "first_fork_inherits_a_page": at("shared"),
    "waiting_prompt_is_cut": at("batch"),
    "first_page_decides_the_second": at("answers"),
    "first_41_tokens_share_a_page": at("equal"),
    "stops_seen_in_blocks": at("answers"),
    "queue_of_73": at("long_queue"),
    "answer_ends_with_a_page": at("long_queue"),
    "forks_leak": at("wear", requests=40),
    "prompt_logits_one_off": at("batch", WIDE, says="of a batch of 20"),
    "generate_other_callers": at("batch", WIDE, says="generate: token 1 of the answer"),
    "logits_of_last_prompt": at("batch", WIDE, says="(a prompt that joins)"),
    "second_turn_one_early": at("walk", WIDE),
    "equal_prompts_never_part": at("equal", WIDE, says="tokens with different continuations: first stored wrong at"),
    "idle_loses_a_page": at("equal", LATER, says="rest: an idle"),
    "a_step_is_off": at("wear", LATER),
    "full_pool_wipes_a_page": at("full_pool", LATER, says="full pool: request"),
    "three_stop_tokens": at("answers", LATER, says="generate: an answer that contains a stop token, to a prompt of"),
    "rows_by_handle": at("walk", LATER, says="walk: a "),
}
LONG = {
    "turn_after_a_turn_overlaps": at("walk"),
    "rows_on_a_prefix_read_as_far_as_the_first": at("shared"),
    "turn_slots_end_at_294": at("walk"),
    "turn_over_a_page_border": at("walk", max_tokens=320, max_batch=8),
    "turn_beyond_the_window": at("walk", policy="ages"),
    "prompt_of_tiles_of_320": at("walk"),
    "step_known_by_its_outer_rows": at("walk"),
    "step_known_in_reverse": at("walk"),
    "rows_of_middle_length": at("walk", max_tokens=1088, seed=1),
    "row_beside_16_sharers": at("shared"),
    "last_page_at_897_tokens": at("walk", max_tokens=1088),
    "turns_leak": at("wear", requests=40),
    "fifth_growth_loses_a_page": at("walk"),
    "rest_of_whole_pages": at("walk"),
    "fork_again_without_a_copy": at("walk"),
    "prefixes_alternate": at("walk"),
    "one_row_joins_in_front": at("walk"),
    "third_of_eight_rows": at("walk"),
    "late_fork_shares_a_page": at("walk", max_tokens=1984),
    "fork_of_depth_4_shares_partial_page": at("shared"),
    "scales_of_a_page_with_17_users": at("shared"),
    "forks_get_one_new_page": at("shared"),
    "forks_computed_once": at("shared"),
    "page_number_in_a_byte": at("crowd"),
    "context_beyond_1024": at("batch", max_tokens=1088),
    "short_last_chunk": at("batch", max_tokens=1152),
    "scale_drifts": at("batch", decode_steps=250),
    "nan_rarely": at("wear", requests=120),
    "mask_one_too_many": at("walk", policy="fp8", max_tokens=320, max_batch=8),
    "chunk_reads_head_0": at("walk", policy="fp8", max_tokens=320, max_batch=8),
    "torch_rows_swapped": at("walk", max_tokens=128, max_batch=6),
    "third_fork_loses_a_token": at("walk", LATER),
    "rows_above_16_beyond_192": at("batch", FAR, says="row 16 of a batch of 18), layer 0"),
    "after_330_decoded": at("batch", FAR, says="a long decode from 1 token: first stored wrong at position 331"),
    "answers_wrap_at_103": at("long_queue", FAR, says="generate: token 1 of the answer to a prompt of"),
    "number_of_another_request": at("crowd", FAR, says="isolation: "),
}
"""Further faults, for `make test-long`."""
CHOSEN = NAMED | (LONG if STRIDE == 1 else {})


@pytest.mark.every
@pytest.mark.parametrize(("fault", "situation"), CHOSEN.items(), ids=CHOSEN)
def test_the_scenario_names_the_fault(
    fault: str, situation: Situation, int8: Path, decoder: Path, model: Any, tmp_path: Path, limit: Limit
) -> None:
    (name, policy, config, says), injected = situation, FAULTS[fault]
    if injected.loads is not nullcontext and find_compiler() is None:
        pytest.skip("no C compiler, or no AVX2")
    reference = make_reference(model, BY_NAME[policy], SHAPE)
    engine: Any = make_reference(model, BY_NAME[policy], SHAPE)
    if injected.kind != "reference":
        bundle = int8 if policy == "int8" else make_bundle(decoder, tmp_path / "bundle", BY_NAME[policy])
        with injected.loads():
            engine = load_engine(bundle, threads=1)
    injected.plant(engine)
    limit(name)
    claimed = min(987, config.max_tokens - 28)
    failures = run_stress_test(engine, ReferenceEngine(reference), config, config.max_batch, claimed, no_progress).failures
    assert any(says in failure if says else failure.startswith((name, "generate", "isolation")) for failure in failures), (
        failures
    )
    if fault == "prompt_logits_one_off":
        assert not any(failure.startswith("isolation") for failure in failures), "no request influences another"
