"""More commands on the tiny model: Ctrl-C during an evaluation, and the verdict with backend=torch."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands.tiny_model import FEW, Swept, pipeline, summary


def test_an_interrupted_evaluation_keeps_its_results_and_resumes(swept: Swept, tmp_path: Path) -> None:
    artifacts = swept[0] / "artifacts"
    work = tmp_path / "work"  # has its own summary, and shares the artifacts that do not depend on samples
    work.mkdir()
    (work / "artifacts").symlink_to(artifacts)
    arguments = ["stage=evaluate", "kv=fp8", "tracking=none", "workloads.samples.copy=60", "workloads.rounds=[1.0]"]
    command = [sys.executable, "-m", "pipeline", f"workdir={work}", *FEW, *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 400
        while not list(artifacts.glob(".partial/baseline/*/unfinished/*/*.safetensors")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        before = sorted(artifacts.rglob("*"))
        refused = pipeline(work, "stage=prune", "tracking=none", "prune.keep_sweeps=0", "prune.apply=true")
        assert refused.returncode == 4, refused.stdout
        assert f"used by process {process.pid} on " in refused.stderr
        assert sorted(artifacts.rglob("*")) == before, "prune removes nothing that a running job may use"
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert summary(work)["exit_code"] == 130
    saved = list(artifacts.glob(".partial/baseline/*/unfinished/*/*.safetensors"))
    assert 0 < len(saved) < 94
    assert pipeline(work, *arguments).returncode == 0
    assert not list(artifacts.glob(".partial/*/*"))


def test_the_torch_backend_gets_the_verdict_of_onnx_runtime(swept: Swept) -> None:
    work, _ = swept
    (by_onnx,) = (candidate for candidate in summary(work)["candidates"] if candidate["policy"] == "fp8")
    engine = ("backend=torch", "backend.device=cpu", "workloads.batch_size=2")
    result = pipeline(work, "stage=evaluate", "kv=fp8", *engine)
    assert result.returncode == 0, result.stderr
    (by_reference,) = summary(work)["candidates"]
    assert [(c["backend"], c["verdict"]) for c in (by_reference, by_onnx)] == [("torch", "PASS"), ("onnxruntime", "PASS")]
    kl, expected = (c["metrics"]["quality/kl_mean"] for c in (by_reference, by_onnx))
    assert kl == pytest.approx(expected, rel=0.02)
    assert 0 < by_reference["metrics"]["noise/kl_max"] < 1e-3, "one pass and stepwise decode differ by rounding"
