"""The record that every benchmark writes: when, where, with what, from which commit. Standard library only."""

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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LIBRARIES = ("torch", "transformers", "onnxruntime", "onnx", "numpy", "optimum-quanto", "hqq")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def record(results: list[dict[str, Any]], libraries: Sequence[str] = LIBRARIES, **more: Any) -> dict[str, Any]:
    """What every results file holds, around the results."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in libraries}},
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
        "results": results,
        **more,
    }


def machine() -> dict[str, Any]:
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu or platform.processor(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "threads": 1}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def version(name: str) -> str | None:
    """Of an installed distribution, None without."""
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit that was measured, "+" when files differ from it, "" outside a checkout."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        say(f"wrote {path}")
