"""Interpreters for tests: a `python` with a fake TensorRT-LLM or SGLang on its path that is otherwise this interpreter."""

import json
import stat
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "contract" / "fake"
SGLANG_PACKAGE = PACKAGE.with_name("fake_sglang")


def make_interpreter(
    folder: Path,
    release: str = "1.2.1",
    mode: str = "sound",
    gpus: tuple[str, ...] = ("9.0",),
    says: str | None = None,
) -> str:
    """Create a fake TensorRT-LLM interpreter and return its path. `mode` selects a fault, `says` replaces all output."""
    folder.mkdir(parents=True)
    # nvidia-smi is only queried for the driver version, and ignores CUDA_VISIBLE_DEVICES.
    script(folder / "nvidia-smi", f"for _ in {' '.join(gpus)}; do echo 580.95; done")
    (folder / "torch.py").write_text("from tensorrt_llm import cuda\n", encoding="utf-8")
    return _python(
        folder,
        f"export FAKE_TRTLLM_RELEASE='{release}' FAKE_TRTLLM_MODE='{mode}' FAKE_TRTLLM_GPUS='{json.dumps(gpus)}'",
        f'export PYTHONPATH="{folder}:{PACKAGE}:$PYTHONPATH" PATH="{folder}:$PATH" PYTHONDONTWRITEBYTECODE=1',
        says=says,
    )


def _python(folder: Path, *environment: str, says: str | None) -> str:
    """Create a `python` script and return its path.

    The script sets the environment, then runs this interpreter, or only prints `says`.
    """
    command = f'exec "{sys.executable}" "$@"' if says is None else f"echo '{says}'; exec cat >/dev/null"
    return script(folder / "python", "\n".join([*environment, command]))


def script(path: Path, text: str) -> str:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def make_sglang_interpreter(folder: Path, release: str = "0.5.23", mode: str = "sound", gpu: bool = True) -> str:
    """Create an interpreter with the fake SGLang, and with a GPU if `gpu` is set; return its path."""
    folder.mkdir(parents=True)
    return _python(
        folder,
        f"export FAKE_SGLANG_RELEASE='{release}' FAKE_SGLANG_MODE='{mode}' FAKE_SGLANG_GPUS={int(gpu)}",
        f'export PYTHONPATH="{SGLANG_PACKAGE}:$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1',
        says=None,
    )
