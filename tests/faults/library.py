"""The list of all faults."""

from faults import computed, pages, serving, situations, stored
from faults.hooks import Fault

FAULTS: list[Fault] = [fault for module in (stored, pages, computed, serving, situations) for fault in module.FAULTS]
BY_NAME = {fault.name: fault for fault in FAULTS}
