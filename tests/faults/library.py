"""All faults, by kind."""

from faults import claims, codes, evictions, kernels, oracle, pages, positions, scales, serving
from faults.fault import Fault

FAULTS: list[Fault] = [
    fault
    for module in (scales, codes, pages, positions, evictions, serving, kernels, oracle, claims)
    for fault in module.FAULTS
]
BY_NAME = {fault.name: fault for fault in FAULTS}
