"""False claims: an engine that misstates its memory, a control without an effect, and a fault that the baseline shares."""

from dataclasses import replace
from functools import partial
from typing import Any

from faults.fault import Fault
from faults.hooks import method, write, zero
from stages.policies.policy import PAGE_TOKENS


def twice_the_pool(memory: Any, _: Any) -> Any:
    """Report a pool of twice its size."""
    report = memory()
    return replace(report, pool_bytes=2 * report.pool_bytes)


of = partial(Fault, "claims")

FAULTS = [
    of("pool_twice_as_large", "allocates twice the bytes that the policy says", method("memory", twice_the_pool)),
    of("control_without_effect", "the must-fail control corrupts a copy that decoding does not read",
       method("corrupt_key_scale", lambda *_: None)),
    of("shared_page_end_unwritten", "both engines lose the last token of every page",
       write("key value", zero, lambda step: step.positions % PAGE_TOKENS == PAGE_TOKENS - 1)),
]  # fmt: skip
