"""A command that dies or fails somewhere: the next one recovers alone, and ends as if nothing had been."""

import pytest
from interruptions import FAULTS, Fault
from recovery import Trials


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_some_operation_is_recovered_from(fault: Fault, trials: Trials) -> None:
    """One operation each, from the first stages to the registry; tests/long/ tries every one."""
    operations, _ = trials.undisturbed
    assert operations > 50, "the seam sees less than there is"
    trials.check(round((0.2 + 0.2 * FAULTS.index(fault)) * operations), fault)
