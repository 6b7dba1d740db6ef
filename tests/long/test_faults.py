"""The library of planted faults: some of it on a few samples, and its page. `make faults` judges all of it."""

import pytest
from faults import page, record
from faults.__main__ import failed_gates
from faults.fault import POLICIES
from faults.ground import Ground, decide_without
from faults.library import ALONE, BY_NAME, FAULTS

from pipeline.verdict.gates import decide

FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.canary_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
)
"""So few samples that nothing can pass, and enough for what is wrong in every request."""

SEEN = {
    "key_scale_head_x1_25": "conformance",
    "page_end_unwritten": "conformance",
    "generate_another_scale": "free_answers",
}
"""Faults, and a gate that sees each of them on a few samples, beside those of ALONE."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("faults"), workloads=FEW)


def test_every_fault_is_listed_once_with_its_kind_and_cache() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 60
    assert {fault.kind for fault in FAULTS} == page.KINDS.keys()
    assert {fault.policy for fault in FAULTS} | {fault.holds for fault in FAULTS} - {""} <= POLICIES.keys()


def test_the_page_is_made_of_the_record() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(record.load(record.RESULTS))


def test_no_gate_refuses_a_sound_engine(ground: Ground) -> None:
    assert failed_gates(ground.judge_sound("int8")) == {}


@pytest.mark.parametrize(("name", "gate"), SEEN.items())
def test_a_planted_fault_is_refused_by_its_gate(name: str, gate: str, ground: Ground) -> None:
    assert gate in failed_gates(ground.judge(BY_NAME[name]))


@pytest.mark.parametrize(("gate", "name"), ALONE.items())
def test_a_gate_that_is_switched_off_lets_its_fault_through(gate: str, name: str, ground: Ground) -> None:
    judged, gates = ground.judge(BY_NAME[name]), ground.config(BY_NAME[name].policy, BY_NAME[name].engine).gates
    assert decide(judged.report, judged.rows, gates).status == "FAIL"
    assert decide_without(gate, judged.report, judged.rows, gates).status != "FAIL"
