"""Decode attention on a GPU: fp8 keys and int4 values against fp8, bf16, torch's SDPA, FlashInfer, and a plain copy.

    python -m benchmarks.decode_attention --json benchmarks/results/decode_attention_h200.json

Prints a table and whether the targets are met. Exit code 4 without a GPU, 1 when a kernel's output was wrong.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch
from rich.console import Console

from benchmarks import attention_cases
from benchmarks.attention_cases import BATCHES, GROUPS, TOKENS, Row
from benchmarks.recording import record, say, write_json

LIBRARIES = ("torch", "triton", "flashinfer-python", "numpy")


def gpu(device: torch.device) -> dict[str, Any]:
    """What the figures depend on; `driver` is "" where nvidia-smi is not found."""
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if which("nvidia-smi") else ""
    return {
        "name": properties.name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def content(rows: list[Row], device: dict[str, Any], copy_bytes_per_s: float) -> dict[str, Any]:
    """The results file."""
    timing = "median over CUDA graph replays between events, the L2 cache read over before each"
    return record(
        rows,
        LIBRARIES,
        gpu=device,
        copy_gb_per_s=copy_bytes_per_s / 1e9,
        timing=timing,
        targets=attention_cases.judge(rows),
    )


def _numbers(text: str) -> list[int]:
    """2k,8192 -> [2048, 8192]."""
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]


def main(arguments_given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file, again after each case")
    parser.add_argument("--batches", type=_numbers, default=BATCHES)
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, help="of each sequence: 2k,8192")
    parser.add_argument("--groups", type=_numbers, default=GROUPS, help="query heads of a KV head")
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="only these: fp8k_int4v,fp8,flashinfer fp8")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time by default")
    arguments = parser.parse_args(arguments_given)
    if not torch.cuda.is_available() or find_spec("triton") is None:
        say("decode_attention.py needs an NVIDIA GPU and Triton, and there are not both here")
        return 4
    from attention_kernels import KERNELS
    from attention_timing import GpuTimer, Place, copy_rate, run_case

    names = [kernel.name for kernel in KERNELS]
    asked = names if arguments.kernels is None else arguments.kernels
    if not set(asked) <= set(names):
        parser.error(f"--kernels={','.join(asked)}: choose from {', '.join(names)}")
    kernels = [kernel for kernel in KERNELS if kernel.name in asked]
    device = torch.device("cuda", torch.cuda.current_device())
    described, timer = gpu(device), GpuTimer(device)
    seed = int(torch.seed() % 2**31) if arguments.seed is None else arguments.seed
    copy_bytes_per_s = copy_rate(timer, device)
    place = Place(device, copy_bytes_per_s)
    say(f"{described['name']}: a copy moves {copy_bytes_per_s / 1e9:.0f} GB/s; seed {seed}")
    rows: list[Row] = []
    with torch.inference_mode():
        for number, case in enumerate(attention_cases.grid(arguments.batches, arguments.tokens, arguments.groups)):
            say(f"B {case.batch}, T {case.tokens}, G {case.group}")
            rows += run_case(case, kernels, timer, place, seed + number)
            write_json(arguments.json, content(rows, described, copy_bytes_per_s) | {"seed": seed})
    console = Console()
    console.print(attention_cases.table(rows))
    for verdict in attention_cases.judge(rows):
        worst = "" if verdict["worst"] is None else f", worst {verdict['worst']:.2f}, median {verdict['median']:.2f}"
        console.print(f"{verdict['verdict']}: {verdict['target']} ({verdict['met']} of {verdict['cases']} cases{worst})")
    return 0 if all(row.get("correct", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
