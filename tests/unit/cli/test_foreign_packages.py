"""The script `kvgate` refuses to run if another distribution's package shadows a package of kvgate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOREIGN = '"""Data pipelines."""\n\nraise RuntimeError("foreign code was run")\n'


def kvgate(*path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the script with the given directories first on the import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(ROOT / "pipeline" / "kvgate"), "--version"]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=cwd)


def test_the_script_is_the_command_line() -> None:
    result = kvgate(ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("kvgate ")


@pytest.mark.parametrize(
    ("planted", "stands_there"),
    [("pipeline/__init__.py", False), ("plugins/__init__.py", False), ("pipeline/__init__.py", True), ("pipeline.py", False)],
)
def test_a_package_that_shadows_ours_is_named_and_not_run(planted: str, stands_there: bool, tmp_path: Path) -> None:
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).write_text(FOREIGN)
    result = kvgate(Path(), ROOT, cwd=tmp_path) if stands_there else kvgate(tmp_path, ROOT)
    place = tmp_path / planted.removesuffix("/__init__.py")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (4, "", 1)
    assert result.stderr.startswith(f"kvgate: error: {place} is not kvgate's, and shadows its own {place.stem}: ")
    assert f"take {tmp_path} out of PYTHONPATH, or uninstall what brought it" in result.stderr
