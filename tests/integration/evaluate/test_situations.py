"""Every fault of `faults.situations` is named by the scenario that covers its situation, and a sound engine passes there."""

from pathlib import Path
from typing import Any

import pytest
from faults.fault import keeps_prefixes
from faults.situations import FAULTS
from helpers.engines.random_llama import BY_NAME, make_engine, make_reference

from stages.core.records import no_progress
from stages.engines.onnx.engine import load_engine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.scenarios import SCENARIOS as ALL_SCENARIOS
from stages.workloads.config import StressTestConfig

CONFIG = StressTestConfig(max_tokens=1024, decode_steps=8, offset_steps=1, max_batch=32, requests=1, seed=0)

SCENARIOS = {
    "turn_slots_end_at_294": "walk",
    "turn_after_a_turn_overlaps": "walk",
    "fork_of_depth_4_shares_partial_page": "shared",
    "rows_on_a_prefix_read_as_far_as_the_first": "shared",
    "scales_of_a_page_with_17_users": "shared",
    "forks_get_one_new_page": "shared",
    "prompt_of_tiles_of_320": "walk",
    "step_known_by_its_outer_rows": "walk",
    "one_row_joins_in_front": "walk",
    "forks_computed_once": "shared",
    "first_fork_inherits_a_page": "shared",
    "waiting_prompt_is_cut": "batch",
    "first_page_decides_the_second": "answers",
    "first_41_tokens_share_a_page": "equal",
    "stops_seen_in_blocks": "answers",
    "queue_of_73": "answers",
    "prompt_equal_to_a_kept_prefix": "prefix",
    "prefix_kept_before_its_last_write": "prefix",
    "prefix_hash_of_120_tokens": "prefix",
    "dropped_prefix_wiped": "prefix",
}
"""Fault -> the scenario that must name it."""


def failures(engine: Any, reference: ReferenceEngine, monkeypatch: pytest.MonkeyPatch, names: set[str]) -> list[str]:
    """Return the failures of an engine in some scenarios."""
    scenarios = [scenario for scenario in ALL_SCENARIOS if scenario.name in names]
    monkeypatch.setattr(stress_test, "SCENARIOS", scenarios)
    return stress_test.run_stress_test(engine, reference, CONFIG, 32, 987, no_progress).failures


@pytest.mark.parametrize("name", ["int8", "recent", "streaming"])
def test_a_sound_engine_passes_all_these_scenarios(
    name: str, decoder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name])
    if name == "int8":
        keeps_prefixes(engine)
    reference = ReferenceEngine(make_reference(model, BY_NAME[name], engine.shape))
    assert failures(engine, reference, monkeypatch, set(SCENARIOS.values())) == []


def test_every_fault_has_a_scenario() -> None:
    assert {fault.name for fault in FAULTS} == SCENARIOS.keys()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_scenario_names_the_fault(fault: Any, int8: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, engine = SCENARIOS[fault.name], load_engine(int8, threads=1)
    if name == "prefix":
        keeps_prefixes(engine)
    fault.plant(engine)
    reference = ReferenceEngine(TorchEngine.from_model(model, BY_NAME["int8"]))
    found = failures(engine, reference, monkeypatch, {name})
    assert any(failure.startswith((name, "generate")) for failure in found), found
