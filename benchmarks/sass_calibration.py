"""The model of latency (plugins/kv_attention/scoreboard.py) held to published speeds of decode attention. Needs no GPU.

    python -m benchmarks.sass_calibration --json benchmarks/results/sass_calibration.json      # half a minute

Published: tokens per second of Qwen3-8B (36 layers, 8 KV heads of 128 channels, 4 query heads each, bf16) with batch 1 on an
H100 in sgl-project/sglang#21775, before and after its Triton kernel got more splits, and with FlashInfer. From 16,000 to 32,000
tokens only attention grows, so that the difference of two step times is what 16,000 more tokens take. `gathered` has the loop
of that kernel: for 32 tokens their places, then their keys, a product, their values, a product, in 4 warps and 2 stages. The
model runs it with the programs that each SM had; `latency` is the one with which it gives the published speed. It should be
that of an H100's memory: some 500 cycles when idle and reached by large pages, more under load.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gathered_kernel import gathered
from benchmarks.recording import log, results_record, write_json
from plugins.kv_attention.aot import compile_kernel
from plugins.kv_attention.kernels.variants import Variant
from plugins.kv_attention.sass import disassemble, main_loop
from plugins.kv_attention.scoreboard import cycles_per_iteration

LAYERS, KV_HEADS, DIM, TOKENS = 36, 8, 128, 32
TOKEN_BYTES = 2 * 2 * DIM
SMS, HZ = 132, 1.755e9
"""An H100 SXM: its SMs and boost clock."""
PUBLISHED = {"before": (74.12, 48.35, 8), "after": (125.28, 110.62, 64)}
"""Tokens per second at 16,000 and at 32,000 tokens, and splits of a KV head: the default of 8, then 132 / 4 rounded up."""
FLASHINFER = (126.81, 113.23)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and record the latency with which the model gives each published bandwidth. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.sass_calibration", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    rows = calibrate()
    for row in rows:
        log(
            f"{row['kernel']}: {row['published_tb_per_s']} TB/s published, at a latency of {row['latency']} cycles by the model"
        )
    log(f"FlashInfer: {grown(*FLASHINFER):.2f} TB/s published")
    content = results_record([], libraries=("triton",), target="sm_90", kernels=rows)
    del content["results"]
    write_json(options.json, content)
    return 0


def calibrate() -> list[dict[str, Any]]:
    """Compile the kernel and return, for each published speed, the latency with which the model gives it."""
    pointers = {"query": "*bf16", "keys": "*bf16", "values": "*bf16", "places": "*i32", "partial": "*fp32"}
    constants = {"T": TOKENS, "D": DIM, "N": 16, "STRIDE": KV_HEADS * DIM}
    kernel = compile_kernel(gathered, pointers | {"tokens": "i32"}, Variant(constants, num_warps=4, num_stages=2), 90)
    body = main_loop(disassemble(kernel.cubin))
    rows = []
    for name, (short, long, splits) in PUBLISHED.items():
        programs = max(1, round(KV_HEADS * splits / SMS))
        cycles = TOKENS * TOKEN_BYTES * HZ * KV_HEADS * splits / (grown(short, long) * 1e12)
        low, high = 1, 10_000
        while high - low > 10:
            middle = (low + high) // 2
            if cycles_per_iteration(body, programs=programs, num_warps=4, latency=middle) < cycles:
                low = middle
            else:
                high = middle
        rows.append(
            {
                "kernel": name,
                "splits": splits,
                "programs_per_sm": programs,
                "published_tb_per_s": round(grown(short, long), 2),
                "cycles_per_iteration": round(cycles),
                "latency": low,
            }
        )
    return rows


def grown(short: float, long: float) -> float:
    """Return the bandwidth in TB/s at which 16,000 more tokens are read, from the tokens per second without and with them."""
    return 16_000 * LAYERS * KV_HEADS * TOKEN_BYTES / (1 / long - 1 / short) / 1e12


if __name__ == "__main__":
    sys.exit(main())
