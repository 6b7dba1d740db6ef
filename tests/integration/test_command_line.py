"""The command line as a user meets it: one line an error, exit 2, quickly, and nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipeline", *arguments], check=False, capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stage=bild"], "stage=bild: no such option, did you mean build?"),
        (["kv=fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["kv.grp=3"], "kv.grp: unknown key"),
        (["kv.value.group=32"], "kv.value.group: unknown key, did you mean group_size?"),
        (["kv=fp8k_int4v", "kv.value.group_size=33"], "kv.value.group_size must be 16, 32, 64 or 128, got 33"),
        (["kv.sink_tokens=-1"], "kv.sink_tokens: input should be greater than or equal to 0 (got -1)"),
        (["gates.max_mean_kl=nan"], "gates.max_mean_kl: input should be a finite number (got nan)"),
        (["seed=abc"], "seed: input should be a valid integer (got 'abc')"),
        (["model.path=/nowhere"], "model.path=/nowhere"),
        (["kv=fp8,int8"], "kv=fp8,int8: several values need a sweep; add -m"),
        (["-m", "kv=fp8,fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["--frobnicate"], "--frobnicate"),
        (["kv=fp8", "backend=tensorflow"], "backend=tensorflow: no such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line_that_names_key_value_and_fix(arguments: list[str], expected: str, tmp_path: Path) -> None:
    result = run(arguments, tmp_path)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert result.stderr.startswith("pipeline: error: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    result = run(["seed=-1", "backend.threads=0"], tmp_path)
    assert result.returncode == 2
    assert "backend.threads" in result.stderr
    assert "seed" in result.stderr


def test_version_is_printed(tmp_path: Path) -> None:
    assert run(["--version"], tmp_path).stdout.startswith("kvgate ")


def test_the_composed_configuration_can_be_shown(tmp_path: Path) -> None:
    result = run(["--cfg", "job", "kv=int8"], tmp_path)
    assert result.returncode == 0
    assert "dtype: int8" in result.stdout
