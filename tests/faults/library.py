"""The list of all faults, and faults that only one gate finds."""

from faults import claims, codes, evictions, kernels, pages, positions, reference, scales, serving, situations
from faults.fault import Fault

FAULTS: list[Fault] = [
    fault
    for module in (scales, codes, pages, positions, evictions, serving, situations, kernels, reference, claims)
    for fault in module.FAULTS
]
BY_NAME = {fault.name: fault for fault in FAULTS}

ALONE: dict[str, str] = {
    "must_fail_control": "control_without_effect",
    "stress_test": "rows_above_16",
    "allocation": "pool_twice_as_large",
}
"""Gate -> a fault that passes if this gate is disabled."""
