"""The list of all faults."""

from faults import claims, codes, evictions, kernels, pages, positions, reference, scales, serving, situations
from faults.fault import Fault

FAULTS: list[Fault] = [
    fault
    for module in (scales, codes, pages, positions, evictions, serving, situations, kernels, reference, claims)
    for fault in module.FAULTS
]
BY_NAME = {fault.name: fault for fault in FAULTS}
