"""Contents of the wheel: configuration and the tiny checkpoint are found without the repository."""

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
    wheel(source, folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The unpacked wheel."""
    with zipfile.ZipFile(only(built, "*.whl")) as archive:
        archive.extractall(built / "site")
    return built / "site"


def wheel(source: Path, out: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source], check=True
    )


def only(folder: Path, pattern: str) -> Path:
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


def test_a_wheel_made_from_the_source_distribution_is_the_same(built: Path, tmp_path: Path) -> None:
    wheel(only(built, "*.tar.gz"), tmp_path)
    ours, theirs = zipfile.ZipFile(only(built, "*.whl")), zipfile.ZipFile(only(tmp_path, "*.whl"))
    assert {item.filename: item.CRC for item in ours.infolist()} == {item.filename: item.CRC for item in theirs.infolist()}


def test_a_wheel_has_no_tests_and_installs_the_command_kvgate(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if path.is_dir() and path.suffix not in (".dist-info", ".data")}
    assert packages == {"pipeline", "stages", "plugins", "conf"}
    (script,) = installed.glob("*.data/scripts/kvgate")
    assert script.read_text().startswith("#!python\n")


def test_image_health_check_and_entry_point_work_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """Run the Dockerfile's own commands, in an environment as empty as a container's."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    health = json.loads(next(line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK")))
    entry = json.loads(next(line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")))
    default = json.loads(next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD")))
    for command, said in ((health, "kvgate "), ([*entry, *default], "kvgate [KEY=VALUE ...]")):
        environment = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(installed), "HOME": "/tmp", "USER": "kvgate"}
        result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(said)
    assert list(tmp_path.iterdir()) == [], "neither writes anything"


def test_a_wheel_carries_every_file_of_its_packages(installed: Path) -> None:
    asked = ["git", "ls-files", "conf", "pipeline", "stages", "plugins"]
    names = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    lost = [name for name in names if not name.endswith("README.md") and not (installed / name).is_file()]
    assert lost in ([], ["pipeline/kvgate"])
