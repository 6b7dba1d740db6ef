"""A fault at every single operation of a small run."""

import pytest
from interruptions import FAULTS, Fault
from recovery import Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_is_recovered_from(fault: Fault, trials: Trials) -> None:
    operations, _ = trials.undisturbed
    for at in range(1, operations + 1):
        trials.check(at, fault)
