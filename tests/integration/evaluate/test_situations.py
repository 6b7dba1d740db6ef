"""An injected fault is named by the scenario that covers its situation."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from faults.library import BY_NAME as FAULTS
from helpers.engines.random_llama import BY_NAME, make_bundle, make_reference
from helpers.stride import STRIDE

from stages.core.records import no_progress
from stages.engines.onnx.engine import load_engine
from stages.engines.onnx.native.compiler import find_compiler
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.conformance.scenarios import SCENARIOS
from stages.policies.policy import KVShape
from stages.workloads.config import StressTestConfig

CONFIG = StressTestConfig(max_tokens=1024, decode_steps=8, offset_steps=1, max_batch=32, requests=1, seed=0)
SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)

WIDE: dict[str, Any] = {"max_tokens": 192, "decode_steps": 72, "offset_steps": 4, "max_batch": 20, "requests": 8}
LATER = WIDE | {"max_tokens": 704, "max_batch": 8}
FAR: dict[str, Any] = {"max_tokens": 1152, "decode_steps": 400, "offset_steps": 8, "max_batch": 20, "requests": 40}

Situation = tuple[str, str, StressTestConfig, str]


def at(scenario: str, policy: str = "int8", says: str = "", **changes: int) -> Situation:
    """Return the scenario that must name a fault, the engine's policy, CONFIG with changes, and a part of the message."""
    return scenario, policy, CONFIG.model_copy(update=changes), says


NAMED = {
    "first_fork_inherits_a_page": at("shared"),
    "waiting_prompt_is_cut": at("batch"),
    "first_page_decides_the_second": at("answers"),
    "first_41_tokens_share_a_page": at("equal"),
    "stops_seen_in_blocks": at("answers"),
    "queue_of_73": at("long_queue"),
    "forks_leak": at("wear", requests=40),
    "prompt_logits_one_off": at("batch", says="of a batch of 20", **WIDE),
    "generate_other_callers": at("batch", says="generate: token 1 of the answer", **WIDE),
    "logits_of_last_prompt": at("batch", says="(a prompt that joins)", **WIDE),
    "second_turn_one_early": at("walk", says="walk: ", **WIDE),
    "equal_prompts_never_part": at("equal", says="tokens with different continuations: first stored wrong at", **WIDE),
    "idle_loses_a_page": at("equal", says="rest: an idle", **LATER),
    "a_step_is_off": at("wear", says="wear: ", **LATER),
    "full_pool_wipes_a_page": at("full_pool", says="full pool: request", **LATER),
    "three_stop_tokens": at("answers", says="generate: an answer that contains a stop token, to a prompt of", **LATER),
    "rows_by_handle": at("walk", says="walk: a ", **LATER),
}
LONG = {
    "turn_after_a_turn_overlaps": at("walk"),
    "rows_on_a_prefix_read_as_far_as_the_first": at("shared"),
    "turn_slots_end_at_294": at("walk", seed=1),
    "turn_over_a_page_border": at("walk", max_tokens=320, max_batch=8),
    "turn_beyond_the_window": at("walk", "ages"),
    "prompt_of_tiles_of_320": at("walk"),
    "step_known_by_its_outer_rows": at("walk"),
    "step_known_in_reverse": at("walk"),
    "rows_of_middle_length": at("walk", max_tokens=1088),
    "row_beside_16_sharers": at("shared"),
    "last_page_at_897_tokens": at("walk", max_tokens=1088),
    "turns_leak": at("wear", requests=40),
    "fifth_growth_loses_a_page": at("walk"),
    "rest_of_whole_pages": at("walk"),
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
    "mask_one_too_many": at("walk", "fp8", max_tokens=320, max_batch=8),
    "chunk_reads_head_0": at("walk", "fp8", max_tokens=320, max_batch=8),
    "torch_rows_swapped": at("walk", max_tokens=128, max_batch=6),
    "third_fork_loses_a_token": at("walk", says="walk: ", **LATER),
    "rows_above_16_beyond_192": at("batch", says="row 16 of a batch of 18), layer 0", **FAR),
    "after_330_decoded": at("batch", says="a long decode from 1 token: first stored wrong at position 331", **FAR),
    "answers_wrap_at_103": at("long_queue", says="generate: token 1 of the answer to a prompt of", **FAR),
    "number_of_another_request": at("crowd", says="isolation: ", **FAR),
}
"""Further faults, for `make test-long`."""
CHOSEN = NAMED | (LONG if STRIDE == 1 else {})


@pytest.mark.every
@pytest.mark.parametrize(("fault", "situation"), CHOSEN.items(), ids=CHOSEN)
def test_the_scenario_names_the_fault(
    fault: str, situation: Situation, int8: Path, decoder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(stress_test, "SCENARIOS", {run: needs for run, needs in SCENARIOS.items() if run.__name__ == name})
    claimed = min(987, config.max_tokens - 28)
    failures = stress_test.run_stress_test(
        engine, ReferenceEngine(reference), config, config.max_batch, claimed, no_progress
    ).failures
    assert any(says in failure if says else failure.startswith((name, "generate", "isolation")) for failure in failures), (
        failures
    )
    if fault == "prompt_logits_one_off":
        assert not any(failure.startswith("isolation") for failure in failures), "no request influences another"
