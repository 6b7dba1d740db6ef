"""The wheel contains the configuration and the tiny checkpoint, and works without the repository."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, check=True, capture_output=True)
    build_wheel(source, folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The unpacked wheel."""
    with zipfile.ZipFile(only_match(built, "*.whl")) as archive:
        archive.extractall(built / "site")
    return built / "site"


def build_wheel(source: Path, out: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source], check=True
    )


def only_match(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=environment)


def test_a_wheel_has_every_policy_and_the_tiny_checkpoint(installed: Path, tmp_path: Path) -> None:
    assert "dtype: int8" in run(installed, tmp_path, "--cfg", "job", "kv=int8").stdout
    result = run(installed, tmp_path, "stage=quantize", "kv=int8", "dry=true")  # reads and checks all files of the checkpoint
    assert (result.returncode, "quantize int8" in result.stdout) == (0, True), result.stderr


def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    build_wheel(only_match(built, "*.tar.gz"), tmp_path)
    wheels = (zipfile.ZipFile(only_match(folder, "*.whl")) for folder in (built, tmp_path))
    original, rebuilt = ({item.filename: item.CRC for item in wheel.infolist()} for wheel in wheels)
    assert rebuilt == original


def test_a_wheel_has_no_tests_and_installs_the_command_kvgate(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if path.is_dir() and path.suffix not in (".dist-info", ".data")}
    assert packages == {"pipeline", "stages", "plugins", "conf"}
    (script,) = installed.glob("*.data/scripts/kvgate")
    assert script.read_text().startswith("#!python\n")


def test_the_images_health_check_and_entry_point_work_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """Run the commands of the Dockerfile in an almost empty environment, like a container's."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    health = json.loads(next(line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK")))
    entry = json.loads(next(line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")))
    default = json.loads(next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD")))
    for command, output in ((health, "kvgate "), ([*entry, *default], "kvgate [KEY=VALUE ...]")):
        environment = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(installed), "HOME": "/tmp", "USER": "kvgate"}
        result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(output)
    assert list(tmp_path.iterdir()) == [], "the commands write no files"


def test_a_wheel_contains_every_tracked_file_of_its_packages(installed: Path) -> None:
    command = ["git", "ls-files", "conf", "pipeline", "stages", "plugins"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    missing = [name for name in names if not name.endswith("README.md") and not (installed / name).is_file()]
    assert missing in ([], ["pipeline/kvgate"])
