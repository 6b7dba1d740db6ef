"""The script `kvgate` where another distribution's package takes the place of one of kvgate's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pipeline" / "kvgate"
FOREIGN = '"""Data pipelines."""\n\nraise RuntimeError("foreign code was run")\n'


def kvgate(*path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the script with these directories first on the import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(SCRIPT), "--version"]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=cwd)


def plant(folder: Path, name: str) -> Path:
    """Write a package of somebody else's."""
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(FOREIGN)
    return package


def install(folder: Path, name: str) -> None:
    """Say that a distribution of the same name installed a package that lies in a folder."""
    information = folder / f"{name}-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (information / "RECORD").write_text(f"{name}/__init__.py,,\n{information.name}/METADATA,,\n{information.name}/RECORD,,\n")


def test_the_script_is_the_command_line() -> None:
    result = kvgate(ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("kvgate ")


@pytest.mark.parametrize("name", ["pipeline", "stages", "plugins"])
def test_a_package_of_the_users_own_in_pythonpath_is_named(name: str, tmp_path: Path) -> None:
    package = plant(tmp_path, name)
    result = kvgate(tmp_path, ROOT)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (4, "", 1)
    assert result.stderr.startswith(f"kvgate: error: {package} is not kvgate's, and shadows its own {name}: ")
    assert f"take {tmp_path} out of PYTHONPATH" in result.stderr


def test_a_package_where_the_user_stands_is_named_if_it_is_on_the_import_path(tmp_path: Path) -> None:
    package = plant(tmp_path, "pipeline")
    result = kvgate(Path(), ROOT, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (4, 1)
    assert str(package) in result.stderr


@pytest.mark.parametrize("kind", ["folder", "module"])
def test_a_folder_or_a_module_of_that_name_is_named_as_well(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "pipeline").mkdir()
    else:
        (tmp_path / "pipeline.py").write_text(FOREIGN)
    # As beside an editable installation, whose packages are found after those of the path.
    result = kvgate(tmp_path) if kind == "folder" else kvgate(tmp_path, ROOT)
    assert (result.returncode, result.stderr.count("\n")) == (4, 1)
    assert str(tmp_path / ("pipeline" if kind == "folder" else "pipeline.py")) in result.stderr


def test_a_distribution_that_is_found_before_ours_is_named_with_the_command_that_removes_it(tmp_path: Path) -> None:
    package = plant(tmp_path, "pipeline")
    install(tmp_path, "pipeline")
    result = kvgate(tmp_path, ROOT)
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr == (
        f"kvgate: error: {package} is of pipeline, and shadows kvgate's own pipeline: "
        "pip uninstall pipeline, and install kvgate again\n"
    )


def test_a_distribution_that_was_installed_over_ours_is_named(tmp_path: Path) -> None:
    """pip writes one distribution's files over another's."""
    for name in ("pipeline", "stages", "plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoint", "__pycache__", "kernels"))
    install(tmp_path, "pipeline")
    plant(tmp_path, "pipeline")
    result = kvgate(tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (4, 1)
    assert "pip uninstall pipeline, and install kvgate again" in result.stderr
