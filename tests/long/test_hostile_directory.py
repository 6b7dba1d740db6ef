"""A checkpoint is data: a command that starts where a model's directory holds code runs none of it, whatever it is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "custom_generate/generate.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py",
    "conftest.py", "sitecustomize.py", "usercustomize.py", "hubconf.py", "setup.py", "processing_evil.py",
    "torch.py", "hydra.py", "yaml.py", "mlflow.py", "onnx.py", "modelopt.py", "stages.py", "hydra_plugins/evil.py",
)  # fmt: skip


def changed(path: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def plant_code(checkpoint: Path, marker: Path) -> None:
    """Write code into the directory that makes `marker` when it runs, and name it wherever a library could look for some."""
    code = f"open({str(marker)!r}, 'a').write(__name__)\ndef generate(*a, **k): raise SystemExit\n"
    for place in PLACES:
        (checkpoint / place).parent.mkdir(exist_ok=True)
        (checkpoint / place).write_text(code)
    classes = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    changed(checkpoint / "config.json", auto_map=classes, custom_generate="generate.py")
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    changed(checkpoint / "tokenizer_config.json", auto_map=tokenizer, chat_template=None)
    changed(checkpoint / "generation_config.json", custom_generate="custom_generate/generate.py")
    (checkpoint / "requirements.txt").write_text("evil==1.0\n")


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
