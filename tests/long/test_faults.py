"""Injected faults judged by whole evaluations on few requests: the gate that must detect a fault fails."""

import pytest
from faults.library import BY_NAME
from faults.runner import FaultRunner

FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1, seed: 0}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4}",
)
"""Workloads that are too small for a PASS, but large enough to detect faults that affect every request."""

EXPECTED_GATES = {"key_scale_head_x1_25": "conformance", "generate_other_callers": "free_answers"}
"""Fault -> gate that must detect it; judged in addition to ALONE."""

ALONE = {"must_fail_control": "control_without_effect", "stress_test": "rows_above_16", "allocation": "pool_twice_as_large"}
"""Gate -> a fault that passes if this gate is disabled."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> FaultRunner:
    return FaultRunner(tmp_path_factory.mktemp("faults"), FEW)


def test_no_gate_refuses_a_sound_engine(runner: FaultRunner) -> None:
    assert runner.judge().failed == set()


@pytest.mark.parametrize(("name", "gate"), EXPECTED_GATES.items())
def test_a_planted_fault_is_refused_by_its_gate(name: str, gate: str, runner: FaultRunner) -> None:
    assert gate in runner.judge(BY_NAME[name].plant).failed


@pytest.mark.parametrize(("gate", "name"), ALONE.items())
def test_a_fault_passes_without_the_only_gate_that_detects_it(gate: str, name: str, runner: FaultRunner) -> None:
    judgement = runner.judge(BY_NAME[name].plant)
    assert judgement.verdict.status == "FAIL"
    assert runner.without(gate, judgement).status != "FAIL"
