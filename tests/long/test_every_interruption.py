"""A fault at every eightieth operation of a small run. KVGATE_EVERY=1 tests every operation, which takes half an hour."""

import os

import pytest
from interruptions import FAULTS, Fault
from recovery import Trials

EVERY = int(os.environ.get("KVGATE_EVERY", "80"))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Trials of a small evaluation, each with one fault."""
    return Trials(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_is_recovered_from(fault: Fault, trials: Trials) -> None:
    operations, _ = trials.undisturbed
    for at in range(1 + FAULTS.index(fault) % EVERY, operations + 1, EVERY):
        trials.check(at, fault)
