"""A fault of `faults.situations` is named by the scenario that covers its situation."""

from pathlib import Path
from typing import Any

import pytest
from faults.fault import keeps_prefixes
from faults.situations import FAULTS
from helpers.engines.random_llama import BY_NAME
from helpers.stride import STRIDE

from stages.core.records import no_progress
from stages.engines.onnx.engine import load_engine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.scenarios import SCENARIOS
from stages.workloads.config import StressTestConfig

CONFIG = StressTestConfig(max_tokens=1024, decode_steps=8, offset_steps=1, max_batch=32, requests=1, seed=0)

NAMED = {
    "turn_after_a_turn_overlaps": "walk",
    "first_fork_inherits_a_page": "shared",
    "waiting_prompt_is_cut": "batch",
    "first_page_decides_the_second": "answers",
    "first_41_tokens_share_a_page": "equal",
    "prefix_hash_of_120_tokens": "prefix",
}
"""Fault -> the scenario that must name it."""
LONG = {
    "rows_on_a_prefix_read_as_far_as_the_first": "shared",
    "turn_slots_end_at_294": "walk",
    "prompt_of_tiles_of_320": "walk",
    "step_known_by_its_outer_rows": "walk",
    "one_row_joins_in_front": "walk",
    "fork_of_depth_4_shares_partial_page": "shared",
    "scales_of_a_page_with_17_users": "shared",
    "forks_get_one_new_page": "shared",
    "forks_computed_once": "shared",
    "stops_seen_in_blocks": "answers",
    "queue_of_73": "long_queue",
    "prompt_equal_to_a_kept_prefix": "prefix",
    "prefix_kept_before_its_last_write": "prefix",
    "dropped_prefix_wiped": "prefix",
}
"""Further faults, for `make test-long`."""
PLANTED = {fault.name: fault for fault in FAULTS}
assert PLANTED.keys() == NAMED.keys() | LONG.keys()


@pytest.mark.every
@pytest.mark.parametrize(("fault", "name"), (NAMED | (LONG if STRIDE == 1 else {})).items())
def test_the_scenario_names_the_fault(fault: str, name: str, int8: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(int8, threads=1)
    if name == "prefix":
        keeps_prefixes(engine)
    PLANTED[fault].plant(engine)
    monkeypatch.setattr(stress_test, "SCENARIOS", [scenario for scenario in SCENARIOS if scenario.name == name])
    reference = ReferenceEngine(TorchEngine.from_model(model, BY_NAME["int8"]))
    failures = stress_test.run_stress_test(engine, reference, CONFIG, 32, 987, no_progress).failures
    assert any(failure.startswith((name, "generate")) for failure in failures), failures
