"""Decode attention on a GPU: kvgate's kernels compared with torch's SDPA, FlashInfer and a plain copy.

    python -m benchmarks.decode_attention --json benchmarks/results/decode_attention_h200.json

Prints a table and the verdicts on the targets. Exit code 4 if a GPU or Triton is missing, 3 if a target is missed, 1 if a
kernel's output is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import attention_cases
from benchmarks.attention_bench import GpuTimer, copy_rate, gpu, lacks_gpu, run_case
from benchmarks.attention_cases import BATCHES, GROUPS, RAGGED, TOKENS, Row
from benchmarks.recording import log, results_record, write_json

LIBRARIES = ("torch", "triton", "flashinfer-python", "numpy")


def content(rows: list[Row], device: dict[str, Any], copy_bytes_per_s: float) -> dict[str, Any]:
    """Return the content of the results file."""
    timing = "median over CUDA graph replays between events, the L2 cache read over before each"
    return results_record(
        rows,
        LIBRARIES,
        gpu=device,
        copy_gb_per_s=copy_bytes_per_s / 1e9,
        timing=timing,
        targets=attention_cases.judge(rows),
        exit_code=attention_cases.exit_code(rows),
    )


def _numbers(text: str) -> list[int]:
    """Parse a list of numbers: 2k,8192 -> [2048, 8192]."""
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",") if part]


def _names(text: str) -> list[str]:
    """Parse a list of names, which may be empty."""
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(
        "python -m benchmarks.decode_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--json", type=Path, help="write the results to this file, again after each case")
    out.add_argument("--batches", type=_numbers, default=BATCHES, help="sequences: 1,8")
    out.add_argument("--tokens", type=_numbers, default=TOKENS, help="tokens of each sequence: 2k,8192")
    out.add_argument("--groups", type=_numbers, default=GROUPS, help="query heads per KV head: 4,8")
    out.add_argument("--ragged", type=_names, default=tuple(RAGGED), help=f"of {', '.join(RAGGED)}; empty for none")
    out.add_argument("--kernels", type=_names, help="only these: fp8k_int4v,fp8,flashinfer fp8")
    out.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time by default")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments. Returns the exit code."""
    arguments = parser().parse_args(argv)
    if lacks_gpu("decode_attention"):
        return 4
    from benchmarks.attention_peers import KERNELS

    by_name = {kernel.name: kernel for kernel in KERNELS}
    requested = list(by_name) if arguments.kernels is None else arguments.kernels
    unknown = (set(requested) - by_name.keys()) | (set(arguments.ragged) - RAGGED.keys())
    if unknown:
        parser().error(f"unknown: {', '.join(sorted(unknown))}; kernels: {', '.join(by_name)}; ragged: {', '.join(RAGGED)}")
    cases = list(attention_cases.grid(arguments.batches, arguments.tokens, arguments.groups, arguments.ragged))
    device = torch.device("cuda", torch.cuda.current_device())
    seed = int(torch.seed() % 2**31) if arguments.seed is None else arguments.seed
    properties, timer = gpu(device), GpuTimer(device)
    copy_bytes_per_s = copy_rate(timer, device)
    log(f"{properties['name']}: a copy moves {copy_bytes_per_s / 1e9:.0f} GB/s; seed {seed}")
    rows: list[Row] = []
    with torch.inference_mode():
        for number, case in enumerate(cases):
            log(f"B {case.batch}, T {case.tokens}, G {case.group} {case.describe()['ragged']}")
            rows += run_case(case, [by_name[name] for name in requested], timer, device, copy_bytes_per_s, seed + number)
            torch.cuda.empty_cache()
            write_json(arguments.json, content(rows, properties, copy_bytes_per_s) | {"seed": seed})
    return report(rows)


def report(rows: list[Row]) -> int:
    """Print the results and the verdicts. Returns the exit code."""
    console = Console()
    console.print(attention_cases.table(rows))
    for verdict in attention_cases.judge(rows):
        worst = "" if verdict["worst"] is None else f", worst {verdict['worst']:.2f}"
        console.print(f"{verdict['verdict']}: {verdict['target']} ({verdict['met']} of {verdict['cases']} cases{worst})")
    return attention_cases.exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
