"""The command line over the trained tiny model with few samples, and a sweep over a sound and a broken cache."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from bad_input.forks import ROOT, BadInput, run_in_fork

from helpers.stride import STRIDE

Ended = subprocess.CompletedProcess[str]
Swept = tuple[Path, Ended]

HEAVY = ("transformers.models.auto.modeling_auto", "modelopt.torch.quantization", "mlflow", "onnxruntime")

FEW = [
    "workloads.samples={prose: 4, retrieval: 24, tool_call: 24, copy: 24, multi_turn: 24}",
    "workloads.max_scored_tokens=48",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8}",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 2, requests: 2}",
    "gates.max_ruined_share=0.1",  # few samples give wide confidence intervals
    "gates.min_samples=8",
    "calibration.samples=8",
    "backend.threads=1",
]
ON_GPU = [
    *("kv=fp8k_int4v", "backend=torch", "backend.device=cuda", "tracking=none"),
    "workloads.samples={prose: 2, retrieval: 10, tool_call: 0, copy: 10, multi_turn: 0}",
    "workloads.max_scored_tokens=16",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8}",
    "gates.min_samples=8",
    "calibration.samples=8",
]
"""Few questions, and the whole stress test, on a GPU with kvgate's kernels."""

MAX_SECONDS = 1200
"""Seconds after which a command counts as hanging, even on a machine that is busy with other tests."""
SECRETS = {"HF_TOKEN": "hunter2-token", "AWS_SECRET_ACCESS_KEY": "hunter2/key", "PGPASSWORD": "hunter2-password"}


def pipeline(work: Path, *arguments: str, few: Sequence[str] = FEW) -> Ended:
    once = {part.partition("=")[0]: part for part in (f"workdir={work}", *few, *arguments)}
    command = [sys.executable, "-m", "pipeline", *once.values()]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **SECRETS, "PYTHONPATH": path}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=work.parent, timeout=MAX_SECONDS, env=environment
    )


def command(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, decoder: Path | None = None
) -> Ended:
    """Run `python -m pipeline` in a fork of the test process, where imports that take seconds are already done.

    Steps that need a child process run in the fork itself, and the export copies `decoder`, an earlier export, if it is given.
    `pipeline` starts the real child processes.
    """
    for module in HEAVY:
        import_module(module)
    case = BadInput("", tuple(arguments), (), runs_stage=True, environment=environment or {})
    with pytest.MonkeyPatch.context() as patch:
        for module in ("pipeline.chain.engine_steps", "stages.engines.onnx.backend"):
            patch.setattr(f"{module}.run_in_child", partial(_in_this_process, decoder))
        result = run_in_fork(case, cwd, seconds=MAX_SECONDS, limited=False)
    assert result.code is not None, "the command hangs"
    return subprocess.CompletedProcess(arguments, result.code, result.stdout, result.stderr)


def _in_this_process(decoder: Path | None, function: Callable[..., None], *paths: Path, **options: Any) -> None:
    if function.__name__ == "export_decoder" and decoder is not None:
        assert options["compute_dtype"] == "float32"
        shutil.copytree(decoder, paths[-1], dirs_exist_ok=True)
    else:
        function(*paths, **options)


def summary(work: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((work / "summary.json").read_text())
    return loaded


def judge_on_gpu(folder: Path, codes: tuple[int, ...], *arguments: str) -> dict[str, Any]:
    """Judge a cache with kvgate's kernels on a GPU and return its candidate. Asserts that the exit code is in `codes`."""
    ended = pipeline(folder / "work", *arguments, few=ON_GPU)
    assert ended.returncode in codes, ended.stdout + ended.stderr
    (candidate,) = summary(folder / "work")["candidates"]
    result: dict[str, Any] = candidate
    return result


def sweep(work: Path, decoder: Path | None = None) -> Swept:
    """Sweep into a work directory; return the directory and the finished process.

    `make test-long` sweeps in a new process: earlier tests may have started torch's threads, which do not survive a fork.
    """
    arguments = ["-m", "kv=fp8,int4_tensor"]
    forked = partial(command, [f"workdir={work}", *FEW, *arguments], work.parent, SECRETS, decoder)
    result = pipeline(work, *arguments) if STRIDE == 1 else forked()
    assert result.returncode == 0, result.stderr
    return work, result
