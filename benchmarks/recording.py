"""Results files: date, machine, versions and commit around the results of a benchmark. Standard library only."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LIBRARIES = ("torch", "transformers", "onnxruntime", "onnx", "numpy")
"""Packages whose versions a results file records by default."""


def log(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def results_record(results: list[dict[str, Any]], libraries: Sequence[str] = LIBRARIES, **fields: Any) -> dict[str, Any]:
    """Return the content of a results file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in libraries}},
        "commit": checkout(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "results": results,
        **fields,
    }


def machine() -> dict[str, Any]:
    """Return the CPU, its cores and the memory of this machine. `threads` is 1, because engine benchmarks use one thread."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu or platform.processor(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "threads": 1}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def checkout() -> str:
    """Return the checkout's commit, with "+" if files have changed; "" outside a checkout or without git."""
    if which("git") is None:
        return ""
    process = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip()


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write `content` to a file and create its folder; do nothing if `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        log(f"wrote {path}")
