"""What the benchmarks of the attention kernels share: the GPU that they need and describe, and the file of their rows."""

import argparse
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from benchmarks.attention_cases import Row
from benchmarks.recording import log, results_record, write_json


def gpu(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on: the GPU, its driver ("" without nvidia-smi) and CUDA."""
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


def lacks_gpu(name: str) -> bool:
    """Say what the benchmark of this name lacks here, and return whether that is anything."""
    lacking = [
        *(["an NVIDIA GPU"] if not torch.cuda.is_available() else []),
        *(["Triton"] if find_spec("triton") is None else []),
    ]
    if lacking:
        log(f"{name}.py lacks here: {'; '.join(lacking)}")
    return bool(lacking)


def measured_rows(
    name: str, description: str | None, measure: Callable[[torch.device], Iterator[Row]], argv: Sequence[str] | None
) -> list[Row] | None:
    """Run a benchmark whose one option is the file of its rows. Returns the rows; None without a GPU or Triton."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    if lacks_gpu(name):
        return None
    device, rows = torch.device("cuda", torch.cuda.current_device()), list[Row]()
    with torch.inference_mode():
        for row in measure(device):
            log(" ".join(f"{field}={value}" for field, value in row.items() if value != ""))
            rows.append(row)
    write_json(arguments.json, results_record(rows, ("torch", "triton"), gpu=gpu(device)))
    return rows
