"""Interpreters for tests: a `python` with a fake TensorRT-LLM and SGLang on its path that is otherwise this interpreter."""

import json
import stat
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "contract" / "fake"


def make_interpreter(
    folder: Path, release: str = "1.2.1", mode: str = "sound", gpus: tuple[str, ...] = ("9.0",), says: str | None = None
) -> str:
    """Create an interpreter with fake libraries and return its path. `mode` selects a fault, `says` replaces all output."""
    folder.mkdir(parents=True)
    # nvidia-smi is only queried for the driver version, and ignores CUDA_VISIBLE_DEVICES.
    script(folder / "nvidia-smi", f"for _ in {' '.join(gpus)}; do echo 580.95; done")
    return script(
        folder / "python",
        f"export FAKE_RELEASE='{release}' FAKE_MODE='{mode}' FAKE_GPUS='{json.dumps(gpus)}'\n"
        f'export PYTHONPATH="{PACKAGES}:$PYTHONPATH" PATH="{folder}:$PATH" PYTHONDONTWRITEBYTECODE=1\n'
        + (f'exec "{sys.executable}" "$@"' if says is None else f"echo '{says}'; exec cat >/dev/null"),
    )


def script(path: Path, text: str) -> str:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
