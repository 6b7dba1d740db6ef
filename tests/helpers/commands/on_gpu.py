"""A short command-line evaluation of the tiny model on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.recording import ROOT

FEW = (
    "workloads.samples={prose: 2, retrieval: 10, tool_call: 0, copy: 10, multi_turn: 0}",
    "workloads.max_scored_tokens=16",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8}",
    "gates.min_samples=8",
    "calibration.samples=8",
)


def judge_on_gpu(folder: Path, codes: tuple[int, ...], *arguments: str) -> dict[str, Any]:
    """Judge fp8k_int4v with kvgate's kernels and return the summary's candidate. Asserts that the exit code is in `codes`."""
    device = ("backend=torch", "backend.device=cuda", "tracking=none", "kv=fp8k_int4v")
    command = [sys.executable, "-m", "pipeline", f"workdir={folder / 'work'}", *FEW, *device, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    completed = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert completed.returncode in codes, completed.stdout + completed.stderr
    (candidate,) = json.loads((folder / "work" / "summary.json").read_text())["candidates"]
    result: dict[str, Any] = candidate
    return result
