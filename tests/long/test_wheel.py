"""The wheel that `python -m build` makes from its source distribution is complete, and works without the repository."""

import json
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.commands.tiny_model import FEW

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_REPOSITORY = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of a copy of the tracked files, and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in tracked_files():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    output([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, "."], source)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment in which only kvgate is installed.

    Its dependencies, and setuptools, are those of the tests' environment, because downloading them would take 3 GB. A .pth file
    adds their folder, but not the folders that .pth files there add: an editable installation of kvgate stays hidden.
    """
    folder = tmp_path_factory.mktemp("environment")
    python = folder / "bin" / "python"
    output([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    (packages_of(folder) / "dependencies.pth").write_text(site.getsitepackages()[0] + "\n")
    (wheel,) = built.glob("*.whl")
    # Without --ignore-installed pip would find the tests' kvgate installed already.
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    output([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], folder)
    return folder


def tracked_files(*folders: str) -> list[str]:
    return output(["git", "ls-files", *folders], ROOT).splitlines()


def packages_of(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def output(command: list[str | Path], cwd: Path, variables: Mapping[str, str] = WITHOUT_REPOSITORY) -> str:
    """Return the standard output of a command, which must end with exit code 0."""
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_an_installed_wheel_judges_a_cache(environment: Path, tmp_path: Path) -> None:
    kvgate = environment / "bin" / "kvgate"
    assert output([kvgate, "--help"], tmp_path).startswith("kvgate [KEY=VALUE ...]")
    assert "PASS" in output([kvgate, "kv=int8", *FEW], tmp_path)
    page = (tmp_path / "work" / "report.html").read_text(encoding="utf-8")
    assert "★" in page
    assert "did not finish" not in page, "the report of a promoting job calls no job missing"


def test_only_the_packages_with_all_their_tracked_files_are_installed(environment: Path) -> None:
    packages = packages_of(environment)
    names = {path.name for path in packages.iterdir() if path.is_dir() and path.suffix != ".dist-info"}
    assert names == {"pipeline", "stages", "plugins", "conf"}
    assert not [name for name in tracked_files(*names) if not (packages / name).is_file() and not name.endswith("README.md")]


def test_the_images_health_check_and_entry_point_work(environment: Path, tmp_path: Path) -> None:
    """Run the commands of the Dockerfile with almost no environment variables, like in a container."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    health = json.loads(next(line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK")))
    entry = json.loads(next(line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")))
    default = json.loads(next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD")))
    variables = {"PATH": str(environment / "bin"), "HOME": "/tmp", "USER": "kvgate"}
    assert output(health, tmp_path, variables).startswith("kvgate ")
    assert output([*entry, *default], tmp_path, variables).startswith("kvgate [KEY=VALUE ...]")
    assert list(tmp_path.iterdir()) == [], "the commands write no files"
