"""More commands on the tiny model: Ctrl-C, backend=torch, a fake TensorRT-LLM, full streams, the workflow, and the notebook."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from helpers.checkpoints.planted_code import plant_code
from helpers.commands.jobs import SHORT, configured, run_job
from helpers.commands.tiny_model import FEW, Swept, pipeline, summary
from helpers.engines.interpreters import make_interpreter
from helpers.verdicts.reports import lines
from nbclient import NotebookClient

from pipeline.registry.summary import load as load_summary
from stages.core.errors import GateRefusal
from stages.verdict.report import load_report

ROOT = Path(__file__).resolve().parents[2]


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
        while not list(artifacts.glob(".partial/baseline/*/unfinished/*.safetensors")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        before = sorted(artifacts.rglob("*"))
        refused = pipeline(work, "stage=prune", "tracking=none", "prune.keep_sweeps=0", "prune.apply=true")
        assert refused.returncode == 4, refused.stdout
        assert "another command uses the artifacts in " in refused.stderr
        assert sorted(artifacts.rglob("*")) == before, "prune removes nothing that a running job may use"
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert summary(work)["exit_code"] == 130
    saved = list(artifacts.glob(".partial/baseline/*/unfinished/*.safetensors"))
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


BRIEF = (
    *SHORT,
    "workloads.samples={prose: 1, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}",
    "gates.min_baseline_probability=0",
    "workloads.rounds=[1.0]",
    "workloads.conformance_samples=0",  # the fake does not compute the model
    "calibration.max_length=64",
)


def test_allowed_scale_changes_let_an_engine_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ModelOpt's export cannot store an FP8 scale below 1. The fake gives no right answers, so no verdict is PASS."""
    overrides = (*BRIEF, "kv=fp8", "backend=trtllm", f"backend.python={make_interpreter(tmp_path / 'bin')}")
    refused = r"8 defaulted \(layer 0 keys: .* became the default, 1\.0\); .*scale_changes=\[defaulted\]"
    with pytest.raises(GateRefusal, match=refused):
        run_job(configured(tmp_path / "work", *overrides))
    job = configured(tmp_path / "work", *overrides, "gates.allow_scale_changes=[defaulted]")
    run_job(job)
    (candidate,) = load_summary(job.work).candidates
    assert candidate.verdict == "INCONCLUSIVE"
    report = load_report(candidate.report.path.parent)
    assert report.overall.fidelity.kl_mean is not None
    assert 1e-6 < report.overall.fidelity.kl_mean < 0.1, "the fake's FP8 cache is close to its FP16 cache"
    assert report.overall.fidelity.non_finite_steps == 0
    noise = report.baseline_tests.noise
    assert noise is not None
    assert noise.kl_max == pytest.approx(0.0, abs=1e-6), "stepwise and one-pass decode give the same logits"
    assert lines("must_fail_control", report)[0].status == "PASS"
    assert "a promotion will refuse the engine, since the samples have at most" in " ".join(capsys.readouterr().out.split())


EXAMPLES = ROOT / "examples"
FEWEST = (
    "workloads.stress_test={max_tokens:128,decode_steps:8,offset_steps:1,max_batch:2,requests:2} calibration.samples=1 "
    "workloads.load={batch:2,context_tokens:64,new_tokens:8}"
)
PIP = f"""#!/bin/sh
echo "$*" >> "$PIP_LOG"
case "$*" in *git+*) exec {sys.executable} -m pip "$@" -q --no-deps --no-build-isolation --target "$SITE";; esac
"""
"""A pip that logs its arguments and installs only kvgate; the dependencies are installed already."""


def test_the_workflow_judges_promotes_and_serves_the_model(tmp_path: Path) -> None:
    """Run the workflow for a user's repository unchanged. It installs a commit and judges that repository's model."""
    repository, site, programs = tmp_path / "repository", tmp_path / "site", tmp_path / "programs"
    shutil.copytree(ROOT / "stages" / "tiny" / "checkpoint", repository / "model")
    shutil.copy(EXAMPLES / "own_samples.jsonl", repository / "questions.jsonl")
    shutil.copy(EXAMPLES / "serve_champion.py", repository)
    programs.mkdir()
    (programs / "pip").write_text(PIP)
    (programs / "pip").chmod(0o755)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    workflow = yaml.safe_load((EXAMPLES / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
    environment = {
        **os.environ,
        **{name: str(value) for name, value in workflow["env"].items() if "${{" not in str(value)},
        "POLICIES": f"int8 {FEWEST}",  # more policies take minutes
        "GATES": "gates.max_ruined_share=0.1",  # 40 questions cannot show a smaller share
        "KVGATE": f"git+file://localhost{ROOT}@{commit}",
        "PATH": f"{programs}:{site}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "SITE": str(site),
        "PIP_LOG": str(tmp_path / "pip.log"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_ENV": str(tmp_path / "env"),
    }

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for job in ("judge", "promote"):
        steps = {step["name"]: step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step}
        steps.pop("Roll back", None)  # users start a rollback on request
        outputs = {name: shell(script) for name, script in steps.items()}
    assert outputs["Try the champion"] == "04 Bergen 14 Tartu\n"
    assert (tmp_path / "pip.log").read_text().splitlines()[
        1
    ] == f"install kvgate[signing] @ git+file://localhost{ROOT}@{commit}"
    assert json.loads((repository / "work" / "summary.json").read_text())["champion"] is not None
    assert "PASS" in (tmp_path / "summary.md").read_text()
    # Fetch the champion as in docs/registry.md#fetch-the-champion.
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{repository}/work/mlflow.db"
    shell("mlflow artifacts download --artifact-uri models:/kvgate-YOUR-SERVICE@champion --dst-path champion")
    (repository / "champion" / "workloads").mkdir()
    shutil.copy(repository / "questions.jsonl", repository / "champion" / "workloads")
    shell("kvgate stage=verify bundle=champion")
    program = 'from pipeline.api import load; print(load("champion").generate("Copy: 04 Bergen 14 Tartu"))'
    assert shell(f"python -c '{program}'").strip()


CAPACITY = "stage=capacity capacity.weights_gib=1"


@pytest.mark.parametrize(
    ("arguments", "code", "redirection"),
    [
        *((CAPACITY, 0, redirection) for redirection in (">&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full")),
        (f"{CAPACITY} log=json", 0, "2>/dev/full"),
        ("stage=nothing", 2, "2>&-"),
    ],
)
def test_closed_or_full_streams_do_not_change_the_exit_code(
    redirection: str, arguments: str, code: int, tmp_path: Path
) -> None:
    command = f"{sys.executable} -m pipeline {arguments} workdir={tmp_path}/work {redirection}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_code_in_the_model_directory_does_not_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint, marker = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")), tmp_path / "it-ran"
    plant_code(checkpoint, marker)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-m", "pipeline", "stage=build", "backend=torch", "backend.device=cpu", "kv=fp8", "tracking=none",
        f"model.path={checkpoint}", f"workdir={tmp_path / 'work'}", "calibration.samples=2",
    ]  # fmt: skip
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=checkpoint, timeout=300, env=environment)
    assert not marker.exists(), marker.read_text()
    assert process.returncode == 0, process.stderr
    assert not list((tmp_path / "cache").rglob("*.py"))


NOTEBOOK = ROOT / "examples" / "kvgate.ipynb"


def test_the_notebook_runs_and_shows_its_stored_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    read: Any = nbformat.read  # untyped
    notebook = read(NOTEBOOK, as_version=4)
    stored = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(stored) == 6, "the notebook is stored with its outputs"
    assert str(ROOT) not in str(stored)
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    results = [output.data["text/plain"] for output in outputs if "data" in output]
    assert [verdict in text for verdict, text in zip(("INCONCLUSIVE", "FAIL", "int8"), results, strict=True)] == [True] * 3
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "04 Bergen 14 Tartu" in printed
    assert "became" in printed
    assert (tmp_path / "work" / "junit.xml").is_file()
