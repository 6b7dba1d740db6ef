"""What this machine is, as far as timings and compiled engines depend on it. No torch: the driver's own tool is asked."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from pipeline.core.errors import MissingRequirement

QUERY = ("name", "compute_cap", "driver_version")
"""Properties of a GPU in nvidia-smi's words (`nvidia-smi --help-query-gpu`)."""
SECONDS = 60
"""A GPU that was idle takes some seconds to answer."""


@cache
def hardware() -> dict[str, object]:
    """Identity of this machine: processor, cores, GPUs."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    try:
        found: list[dict[str, str]] = gpus()
    except MissingRequirement as error:
        found = [{"error": str(error)}]  # an engine on the CPU does not need it, and its identity says so
    return {"machine": platform.machine(), "cpu": cpu, "cores": os.cpu_count(), "gpus": found}


@cache
def gpus() -> list[dict[str, str]]:
    """Name, compute capability and driver of every NVIDIA GPU, empty where there is no driver.

    Raises MissingRequirement when a driver is installed that does not answer: an identity must not silently lack its GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stdout", None) or str(error)
        raise MissingRequirement(f"nvidia-smi is installed but does not answer: {str(said).strip().splitlines()[0]}") from error
    lines = [line.split(", ") for line in asked.stdout.splitlines() if line.strip()]
    return [dict(zip(QUERY, (value.strip() for value in line), strict=True)) for line in lines]
