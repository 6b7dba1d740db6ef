"""A checkpoint is data: a command started inside a model directory runs no code from the directory, under any file name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hostile import plant_code

ROOT = Path(__file__).resolve().parents[2]


def test_no_code_of_a_model_directory_runs(tiny_checkpoint: Path, tmp_path: Path) -> None:
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
