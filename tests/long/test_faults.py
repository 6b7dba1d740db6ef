"""The library of planted faults: some of it on a few samples, and its page. `make faults` judges all of it."""

from collections import Counter

import pytest
from faults import page, record
from faults.__main__ import failed_gates
from faults.fault import POLICIES
from faults.ground import Ground, decide_without
from faults.library import BY_NAME, FAULTS
from faults.mutation import ALONE, FEW

from pipeline.verdict.gates import decide

SEEN = {
    "key_scale_head_x1_25": "conformance",
    "page_end_unwritten": "conformance",
    "generate_another_scale": "free_answers",
}
"""Faults, and a gate that sees each of them on a few samples, beside those of ALONE."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("faults"), workloads=FEW)


def test_the_library_is_as_large_as_its_page_says_and_every_fault_is_listed() -> None:
    assert len(FAULTS) >= 60
    assert not [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    assert {fault.kind for fault in FAULTS} == page.KINDS.keys()
    assert {fault.policy for fault in FAULTS} | {fault.holds for fault in FAULTS} - {""} <= POLICIES.keys()


def test_the_page_is_made_of_the_record() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(record.load(record.RESULTS), record.load(record.BEFORE))


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
