"""What decides the decode kernels' speed on a GPU: programs of an SM, warps and parts of the reduce, programmatic launches.

    python -m benchmarks.attention_variants --json benchmarks/results/attention_variants_h200.json

Prints and writes the microseconds of a decode step of one layer. plugins/kv_attention/kernels/variants.py has the choice.
Exit code 4 without a GPU or Triton.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attention_bench import GpuTimer, Step, measured_rows
from benchmarks.attention_cases import Case, Row

CASES = (Case(32, 8192, 8), Case(32, 2048, 4), Case(8, 8192, 8))
STORAGES = ("fp8k_int4v", "fp8", "bf16")
RESIDENT = (2, 3, 4, 5, 6, 7, 8)
REDUCES = tuple(product(((4, 16), (2, 8), (1, 16), (1, 8), (1, 4)), (False, True)))
"""(warps, parts at once) of decode_reduce, and whether it may begin before decode_partial has ended."""


def measure(device: torch.device) -> Iterator[Row]:
    """Yield a row of every variant: its case, what varies, and microseconds."""
    from plugins.kv_attention import launch
    from plugins.kv_attention.kernels.variants import reduce_variant as shipped

    timer = GpuTimer(device)

    def reduce_variant(warps: int, parts: int, overlaps: bool, setting: Any) -> Any:
        variant = shipped(setting)
        constants = variant.constants | {"CHUNK": parts, "PDL": overlaps}
        return replace(variant, constants=constants, num_warps=warps, overlaps=overlaps)

    for case, storage in product(CASES, STORAGES):
        step = Step(case, storage, device, seed=1)
        inputs = (step.layout, step.query, step.key_new, step.value_new, step.cache, step.page_table, step.lengths)

        def microseconds(programs: int, inputs: tuple[Any, ...] = inputs, step: Step = step) -> float:
            plan = launch.plan_decode(step.layout, step.lengths, programs=programs)
            return timer(partial(launch.decode_attention, *inputs, plan=plan, scaling=step.scaling), None)[0]

        what = case.describe() | {"storage": storage, "moved_bytes": case.moved_bytes(storage)}
        programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
        for (warps, parts), overlaps in REDUCES:
            with patch.object(launch, "reduce_variant", partial(reduce_variant, warps, parts, overlaps)):
                found = microseconds(programs)
            yield what | {"warps": warps, "parts": parts, "overlaps": overlaps, "microseconds": found}
        for resident in RESIDENT:
            programs = launch.choose_programs(case.batch, case.kv_heads, case.pages, launch.sm_count(device), resident)
            yield what | {"resident": resident, "microseconds": microseconds(programs)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments. Returns the exit code."""
    return 4 if measured_rows("attention_variants", __doc__, measure, argv) is None else 0


if __name__ == "__main__":
    sys.exit(main())
