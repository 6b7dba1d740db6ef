"""False claims: engines that misstate their format or their memory, and faults that the baseline shares."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, method, write, zero
from faults.pages import offset


def reports(**changes: Any) -> Plant:
    """Falsify the engine's memory report: new values, or functions of the engine and the sound report."""

    def faulty(memory: Any, engine: Any) -> Any:
        report = memory()
        given = {name: to(engine, report) if callable(to) else to for name, to in changes.items()}
        return replace(report, **given)

    return method("memory", faulty)


def another_bundle(engine: Any) -> None:
    """Let the engine hold another policy's bundle. `corrupt_key_scale` still uses the policy of the real arrays."""
    corrupt = engine.corrupt_key_scale

    def faulty(*given: Any) -> None:
        claimed, engine.policy = engine.policy, engine.pool.policy
        corrupt(*given)
        engine.policy = claimed

    engine.corrupt_key_scale = faulty


AS_CLAIMED = Plant("the bundle", another_bundle) + reports(
    pool_bytes=lambda engine, report: engine.policy.pool_bytes(engine.shape, report.pages), window_bytes=0
)
"""An engine with another policy's bundle that reports the memory of the claimed policy."""


def saturating(x: Array, _: Step) -> Any:
    """Saturate float16 keys: multiplied by 1,024, keys beyond 2 would exceed its range. Other types stay unchanged."""
    return np.clip(x, -2, 2) if x.dtype == np.float16 else x


of = partial(Fault, "claims")

FAULTS = [
    of("float16_as_int4_tensor", "int4_tensor", "stores float16, claims int4_tensor, and its memory too: ranks first",
       AS_CLAIMED, "conformance", holds="fp16"),
    of("pool_twice_as_large", "int8", "allocates twice the bytes that the policy says",
       reports(pool_bytes=lambda _, report: 2 * report.pool_bytes), "allocation"),
    of("control_without_effect", "int8", "the must-fail control corrupts a copy that decoding does not read",
       method("corrupt_key_scale", lambda *_: None), "must_fail_control"),
    of("shared_page_end_unwritten", "int8", "both engines lose the last token of every page",
       write("key value", zero, offset(63)), shared=True),
    of("baseline_saturates", "int8", "the baseline's own keys saturate; the candidate's do not", write("key", saturating),
       shared=True),
]  # fmt: skip
