"""The reference engine's llama.cpp types against ggml's own code: every byte must be equal."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from ggml_cases import NAMES, form_of, raw, vectors

from stages.engines.reference.formats import quantize

SCRIPT = Path(__file__).parents[1] / "helpers" / "ggml_rows.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_ggmls(name: str, tmp_path: Path, llamacpp_python: str) -> None:
    random = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(3)) * 8
    x = torch.cat([vectors().flatten(0, 1), random.flatten(0, 1)])
    np.save(tmp_path / "x.npy", x.numpy())
    width = form_of(name).token_bytes(64)
    command = [llamacpp_python, str(SCRIPT), str(tmp_path / "x.npy"), str(tmp_path / "rows.npz"), f"{name}={width}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = np.load(tmp_path / "rows.npz")[name]
    ours = raw(quantize(x[None], form_of(name), None))[0]
    np.testing.assert_array_equal(ours, theirs)
