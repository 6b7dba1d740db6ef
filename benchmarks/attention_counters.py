"""What a step of decode_attention.py launches, by torch's profiler, and the bytes of DRAM that it moves, by Nsight Compute."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
FORBIDDEN = "ERR_NVGPUCTRPERM"
"""What Nsight Compute says where the driver keeps its counters from the user."""
PROFILE_SECONDS = 600


def launched(run: Callable[[], Tensor]) -> list[dict[str, Any]]:
    """Return the kernels, copies and fills that one run launches on the GPU, with their microseconds, in order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    return [{"name": event.name, "microseconds": event.device_time} for event in on_gpu]


def missing() -> str | None:
    """Return what is missing here to count bytes of DRAM, None if nothing is that can be seen without trying."""
    if which("ncu") is None:
        return "ncu is not on PATH: install Nsight Compute, which comes with NVIDIA's CUDA toolkit"
    return None


def dram_bytes(arguments: Sequence[str]) -> dict[str, Any]:
    """Run decode_attention.py with `arguments`, which run one kernel once, under Nsight Compute.

    Returns:
        `read`, `written` and `kernels`, or `missing`: why there are no counts.
    """
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "benchmarks.decode_attention", *arguments]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ.copy(), timeout=PROFILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"Nsight Compute took longer than {PROFILE_SECONDS} s"}
    if FORBIDDEN in process.stdout + process.stderr:
        allow = "load the module nvidia with NVreg_RestrictProfilingToAdminUsers=0, or run as root"
        return {"missing": f"the driver keeps the GPU's counters from this user ({FORBIDDEN}): {allow}"}
    counts = parse(process.stdout)
    if process.returncode or not counts["kernels"]:
        last = next(iter(reversed((process.stderr or process.stdout).strip().splitlines())), "it said nothing")
        return {"missing": f"Nsight Compute ended with {process.returncode}: {last}"}
    return counts


def parse(output: str) -> dict[str, Any]:
    """Return the bytes read and written, of all kernels together, and the number of kernels, of Nsight Compute's CSV output.

    Lines of other programs may stand before the table; numbers may have commas between thousands.
    """
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(lines[first:]))
    totals = [
        sum(float(row["Metric Value"].replace(",", "")) for row in rows if row["Metric Name"] == metric) for metric in METRICS
    ]
    return {"read": int(totals[0]), "written": int(totals[1]), "kernels": len({row["ID"] for row in rows})}
