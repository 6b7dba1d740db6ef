"""The processor and GPUs that timings and compiled engines depend on, read without torch from the driver's own tool."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from stages.core.errors import MissingRequirement, short
from stages.core.redaction import child_environment

QUERY = ("name", "compute_cap", "driver_version")
"""Properties of a GPU as nvidia-smi names them (`nvidia-smi --help-query-gpu`)."""
TIMEOUT_S = 60


@cache
def hardware() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    cpu = names[0] if names else platform.processor()
    try:
        devices: list[dict[str, str]] = gpus()
    except MissingRequirement as error:
        devices = [{"error": str(error)}]  # an engine on the CPU needs no driver; its artifact records the failure
    return {"machine": platform.machine(), "cpu": cpu, "cores": os.cpu_count(), "gpus": devices}


@cache
def gpus() -> list[dict[str, str]]:
    """Return the properties QUERY of every NVIDIA GPU; empty without a driver.

    Raises MissingRequirement if nvidia-smi fails or has another output: an artifact's key could otherwise lack its GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        environment = child_environment()
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except (subprocess.SubprocessError, OSError) as error:
        output = str(getattr(error, "stdout", None) or "").strip() or str(error)
        reason = output.splitlines()[0]
        raise MissingRequirement(f"nvidia-smi is installed but does not answer: {reason}") from error
    devices = []
    for line in filter(str.strip, answer.stdout.splitlines()):
        values = line.rsplit(", ", len(QUERY) - 1)  # a name may have a comma
        if len(values) != len(QUERY):
            raise MissingRequirement(f"nvidia-smi does not describe a GPU: {short(line.strip())}")
        devices.append(dict(zip(QUERY, map(str.strip, values), strict=True)))
    return devices
