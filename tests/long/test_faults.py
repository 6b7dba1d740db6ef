"""The library of planted faults: a few faults judged on few requests, the record, and the page.

`make faults` judges all faults.
"""

import pytest
from faults import page, record
from faults.__main__ import failed_gates, jobs
from faults.fault import POLICIES
from faults.library import ALONE, BY_NAME, FAULTS, SOUND_ENGINES, sound_name
from faults.runner import FaultRunner, Judgement, decide_without

RECORD, COSTS = record.load(record.RESULTS, record.Outcome), record.load(record.COSTS, record.Cost)

JUDGED = [name for name in RECORD if name in BY_NAME]

NOT_MEASURED = {
    "turn_slots_end_at_294",
    "fork_of_depth_4_shares_partial_page",
    "rows_on_a_prefix_read_as_far_as_the_first",
    "scales_of_a_page_with_17_users",
    "prompt_of_tiles_of_320",
    "prompt_equal_to_a_kept_prefix",
    "prefix_kept_before_its_last_write",
}
"""Faults whose cost the next `make faults` measures."""

FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1, seed: 0}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4}",
)
"""Workloads that are too small for a PASS, but large enough to detect faults that affect every request."""

EXPECTED_GATES = {
    "key_scale_head_x1_25": "conformance",
    "generate_other_callers": "free_answers",
}
"""Fault -> gate that must detect it; judged in addition to ALONE."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> FaultRunner:
    return FaultRunner(tmp_path_factory.mktemp("faults"), workloads=FEW)


def test_every_fault_has_a_unique_name_a_kind_a_policy_and_a_place() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 60
    assert [fault.name for fault in FAULTS if not fault.kind] == []
    assert {fault.policy for fault in FAULTS} | {fault.holds for fault in FAULTS} - {""} <= POLICIES.keys()
    assert [fault.name for fault in FAULTS if not fault.acts] == []


def test_every_fault_has_a_unique_description() -> None:
    assert len({fault.models for fault in FAULTS}) == len(FAULTS)


def test_the_page_counts_the_faults_without_a_judgement() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    missing = [job.name for job in jobs() if job.fault is not None and job.name not in RECORD]
    assert (f"{len(missing)} newer faults are not judged yet" in text) == bool(missing)


def test_the_page_explains_every_fault_that_passes() -> None:
    assert {name for name in JUDGED if not RECORD[name].caught} <= set(page.REASONS)


def test_faults_that_harm_answers_have_a_measured_cost() -> None:
    harmful = {name for name in JUDGED if BY_NAME[name].harm == "answers"}
    assert [name for name in harmful & COSTS.keys() if not COSTS[name].real] == []
    assert harmful - COSTS.keys() == NOT_MEASURED


def test_a_refused_fault_is_detected_by_its_declared_gate() -> None:
    refused = [name for name in JUDGED if RECORD[name].verdict == "FAIL"]
    assert {name: BY_NAME[name].by for name in refused if BY_NAME[name].by not in RECORD[name].gates} == {}


@pytest.mark.parametrize("policy", SOUND_ENGINES)
def test_an_engine_without_a_fault_passes_with_every_seed(policy: str) -> None:
    assert [RECORD[sound_name(policy, seed)].verdict for seed in range(5)] == ["PASS"] * 5


def test_the_page_is_generated_from_the_record() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(RECORD, COSTS)


def test_no_gate_refuses_a_sound_engine(runner: FaultRunner) -> None:
    assert failed_gates(runner.judge("int8")) == {}


def judge(name: str, runner: FaultRunner) -> Judgement:
    fault = BY_NAME[name]
    return runner.judge(fault.policy, fault.engine, fault)


@pytest.mark.parametrize(("name", "gate"), EXPECTED_GATES.items())
def test_a_planted_fault_is_refused_by_its_gate(name: str, gate: str, runner: FaultRunner) -> None:
    assert gate in failed_gates(judge(name, runner))


@pytest.mark.parametrize(("gate", "name"), ALONE.items())
def test_a_fault_passes_without_the_only_gate_that_detects_it(gate: str, name: str, runner: FaultRunner) -> None:
    judgement, gates = judge(name, runner), runner.config(BY_NAME[name].policy, BY_NAME[name].engine).gates
    assert judgement.verdict.status == "FAIL"
    assert decide_without(gate, judgement.report, judgement.rows, gates).status != "FAIL"
