"""Commands with closed or full output streams, in a directory with planted code, and in the notebook."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.checkpoints.planted_code import plant_code
from nbclient import NotebookClient


@pytest.mark.parametrize(
    ("arguments", "code", "redirection"),
    [
        *(("stage=capacity", 0, redirection) for redirection in (">&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full")),
        ("stage=capacity log=json", 0, "2>/dev/full"),
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


ROOT = Path(__file__).resolve().parents[2]


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
