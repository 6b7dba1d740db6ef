"""A checkpoint is data: nothing in its directory runs. What is wrong with its files is in tests/bad_input."""

import shutil
from pathlib import Path

import pytest
import torch
from hostile import building, plant_code
from safetensors.torch import load_file, save_file
from warm import command

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.weights import check_weights
from stages.checkpoints import expected_tensors


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_no_code_that_transformers_would_load_runs(checkpoint: Path, tmp_path: Path) -> None:
    """Nor does what a command of its own would find there first: `tests/long/test_hostile_directory.py`."""
    marker = tmp_path / "it-ran"
    plant_code(checkpoint, marker)
    process = command(building(checkpoint, tmp_path), checkpoint, {"HF_HOME": str(tmp_path / "cache")})
    assert not marker.exists(), marker.read_text()
    assert process.returncode == 0, process.stderr
    assert not list((tmp_path / "cache").rglob("*.py"))


def test_what_older_files_hold_and_the_model_computes_itself_is_no_fault(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(tensors, checkpoint / "model.safetensors")
    check_weights(inspect_checkpoint(checkpoint), expected_tensors)
