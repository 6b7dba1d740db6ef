"""Parameters that determine the decode kernels' speed on a GPU: tiles, pipeline stages, programs per SM, and the reduction.

    python -m benchmarks.attention_variants --json benchmarks/results/attention_variants_h200.json

Prints and writes the microseconds of a decode step of one layer. plugins/kv_attention/variants.py has the choice.
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

from benchmarks.attention_bench import DecodeInputs, GpuTimer, run_benchmark
from benchmarks.attention_cases import JUDGED_KERNEL, DecodeCase, Row

CASES = (DecodeCase(32, 8192, 8), DecodeCase(32, 2048, 4), DecodeCase(8, 8192, 8))
STORAGES = ("fp8k_int4v", "fp8", "bf16")
RESIDENT = (2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Numbers of programs launched per SM. If they do not all fit, later programs start when earlier programs end."""
REDUCES = tuple(product(((4, 16), (1, 16), (1, 8), (1, 4)), (False, True)))
"""(warps, parts at once) of reduce_parts, and whether reduce_parts may start before decode_partial has ended."""
TILES = ((64, 5, (4, 8, 12, 16)), (64, 7, (2, 3, 4, 5)), (32, 5, (4, 8, 12, 16, 24)), (32, 7, (4, 8)), (32, 9, (4, 8)))
"""(tokens of a tile, pipeline stages, programs launched per SM) of decode_partial over JUDGED_KERNEL's storage.

5, 7 and 9 stages hold two, three and four tiles in shared memory. None of the variants spills on sm_90. An SM runs 7 programs
at once with 64 tokens and 5 stages, 5 programs with 64 tokens and 7 stages, and 12, 10 and 8 programs with 32 tokens. An SM has
four schedulers, so 4, 8 and 12 programs load them evenly.
"""


def measure(device: torch.device) -> Iterator[Row]:
    """Yield a row per variant: the case, the varied parameters, and microseconds."""
    from plugins.kv_attention import launch
    from plugins.kv_attention.variants import decode_variant as shipped_decode
    from plugins.kv_attention.variants import reduce_variant as shipped

    timer = GpuTimer(device)

    def reduce_variant(warps: int, parts: int, overlaps: bool, setting: Any) -> Any:
        variant = shipped(setting)
        constants = variant.constants | {"CHUNK": parts, "PDL": overlaps}
        return replace(variant, constants=constants, num_warps=warps, overlaps=overlaps)

    def decode_variant(tile: int, stages: int, setting: Any) -> Any:
        variant = shipped_decode(setting)
        return replace(variant, constants=variant.constants | {"T": tile, "STAGES": stages}, num_stages=stages)

    for storage, case in product(STORAGES, CASES):
        step = DecodeInputs(case, storage, device, seed=1)
        inputs = (step.layout, step.query, step.key_new, step.value_new, step.cache, step.page_table, step.lengths)

        def timed(programs: int, inputs: tuple[Any, ...] = inputs, step: DecodeInputs = step) -> Row:
            """Return the microseconds, and the relative L2 error of the last sequence."""
            plan = launch.plan_decode(step.layout, step.lengths, programs=programs)
            microseconds, out = timer(partial(launch.decode_attention, *inputs, plan=plan, scaling=step.scaling), None)
            expected = step.expected(step.case.batch - 1, with_new=True)
            error = float((out[-1].float() - expected).norm() / expected.norm())
            return {"programs": programs, "microseconds": microseconds, "error": error}

        what = case.describe() | {"storage": storage, "moved_bytes": case.moved_bytes(storage)}
        programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
        counts = [
            launch.choose_programs(case.batch, case.kv_heads, case.pages, launch.sm_count(device), resident)
            for resident in range(1 + max(RESIDENT + tuple(count for *_, counts in TILES for count in counts)))
        ]
        for tile, stages, residents in TILES if storage == JUDGED_KERNEL else ():
            with patch.object(launch, "decode_variant", partial(decode_variant, tile, stages)):
                for resident in residents:
                    # With a multiple of the number of sequences, no program's share spans two sequences.
                    for number in sorted({counts[resident], counts[resident] // case.batch * case.batch} - {0}):
                        yield what | {"tile": tile, "stages": stages, "resident": resident} | timed(number)
        for (warps, parts), overlaps in REDUCES if storage == JUDGED_KERNEL else ():
            with patch.object(launch, "reduce_variant", partial(reduce_variant, warps, parts, overlaps)):
                yield what | {"warps": warps, "parts": parts, "overlaps": overlaps} | timed(programs)
        for resident in RESIDENT if storage != JUDGED_KERNEL else ():
            yield what | {"resident": resident} | timed(counts[resident])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments. Returns the exit code."""
    return 4 if run_benchmark("attention_variants", __doc__, measure, argv) is None else 0


if __name__ == "__main__":
    sys.exit(main())
