"""Claims: engines that are not what they say, and faults that the baseline has as well."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Writing, on_logits, on_write
from faults.pages import unwritten
from faults.positions import rotated_one_late
from pipeline.core.records import MemoryReport


def another_bundle(engine: Any) -> None:
    """The engine holds another policy's bundle; it knows that where its own arrays are concerned."""
    corrupt = engine.corrupt_scale

    def faulty(*given: Any) -> None:
        claimed, engine.policy = engine.policy, engine.pool.policy
        corrupt(*given)
        engine.policy = claimed

    engine.corrupt_scale = faulty


def memory_as_claimed(engine: Any) -> None:
    """The memory that the claimed policy would take is what the engine reports."""
    another_bundle(engine)
    memory = engine.memory

    def faulty() -> MemoryReport:
        report: MemoryReport = memory()
        return replace(report, pool_bytes=engine.policy.pool_bytes(engine.shape, report.pages), window_bytes=0)

    engine.memory = faulty


def twice_the_pool(engine: Any) -> None:
    """Every page is allocated twice: codes are padded to the width of float16."""
    memory = engine.memory
    engine.memory = lambda: replace(memory(), pool_bytes=2 * memory().pool_bytes)


def out_of_the_canarys_reach(engine: Any) -> None:
    """What the must-fail control corrupts is not what decoding reads."""
    engine.corrupt_key_scale = lambda _: None


def warmer(engine: Any) -> None:
    def edit(logits: Array, _: Sequence[int]) -> None:
        logits *= 1.02

    on_logits(engine, edit)


def baseline_saturates(engine: Any) -> None:
    """Keys that are multiplied by 1,024 for float16's sake saturate there; only what stores float16 does so."""

    def edit(values: Array, _: Writing) -> None:
        if values.dtype == np.float16:
            np.clip(values, -2, 2, out=values)

    on_write(engine, "key_pool", edit)


KIND = "claims"

FAULTS = [
    Fault("float16_as_int4_tensor", KIND, "stores float16, claims int4_tensor, and its memory too: ranks first", "int4_tensor",
          memory_as_claimed, holds="fp16"),
    Fault("int8_as_fp8", KIND, "stores INT8 with scales a token, claims calibrated FP8, and its memory too", "fp8",
          memory_as_claimed, holds="int8"),
    Fault("pool_twice_as_large", KIND, "allocates twice the bytes that the policy says", "int8", twice_the_pool),
    Fault("canary_without_effect", KIND, "what the must-fail control corrupts is a copy that decoding does not read", "int8",
          out_of_the_canarys_reach),
    Fault("logits_x1_02", KIND, "another final multiplier: the weights are not those of the baseline", "fp8", warmer),
    Fault("shared_page_end_unwritten", KIND, "both engines lose the last token of every page", "int8", unwritten(63),
          shared=True),
    Fault("shared_rope_one_late", KIND, "both engines rotate decoded tokens one position late", "int8", rotated_one_late,
          shared=True),
    Fault("baseline_saturates", KIND, "the baseline's own keys saturate; the candidate's do not", "int8", baseline_saturates,
          shared=True),
]  # fmt: skip
