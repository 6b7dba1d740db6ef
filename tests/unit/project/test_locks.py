"""The locks in requirements/: complete, by hash, in one version, and within the ranges of pyproject.toml."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"run": ("gguf", "postgres"), "demo": ("rtx",), "test": ("test", "postgres")}
"""Extras that each lock contains, in addition to the dependencies. `requirements/lock` passes the same to uv."""


def locked(name: str) -> dict[str, tuple[str, Marker | None]]:
    """Return the packages of a lock: name -> (version, marker)."""
    found: dict[str, tuple[str, Marker | None]] = {}
    for line in (LOCKS / f"{name}.lock").read_text().splitlines():
        if not line.startswith(" "):
            requirement = Requirement(line.removesuffix("\\").strip())
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            found[canonicalize_name(requirement.name)] = (pin.version, requirement.marker)
    return found


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """Return the requirements of the project and of `extras`, which may refer to other extras."""
    given = PROJECT["project"]
    lines = [*given["dependencies"], *(line for extra in extras for line in given["optional-dependencies"][extra])]
    found = []
    for requirement in map(Requirement, lines):
        inner = tuple(sorted(requirement.extras)) if requirement.name == "kvgate" else ()
        found += wanted(inner) if inner else [requirement]
    return found


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.lock")), ids=lambda path: path.stem)
def test_every_package_is_locked_by_hash(path: Path) -> None:
    packages = re.split(r"\n(?=[^ ])", path.read_text().strip())
    assert packages
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package.splitlines()[0]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_the_project_requires_in_versions_that_it_allows(name: str) -> None:
    versions = locked(name)
    for requirement in wanted(EXTRAS[name]):
        if requirement.name != "torch":  # torch is installed first, by version, because its build depends on the machine
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)][0]), requirement.name


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_its_packages_require_in_turn(name: str) -> None:
    versions = locked(name)
    for package, (version, marker) in versions.items():
        if marker is None or marker.evaluate():
            for line in _requires(package, version):
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(needed.name) in {*versions, "torch"}, f"{package} needs {needed.name}"


@pytest.mark.parametrize("name", ["run", "demo", "build"])
def test_what_is_installed_elsewhere_has_the_versions_that_were_tested(name: str) -> None:
    tested = locked("test")
    for package, (version, _) in locked(name).items():
        assert tested.get(package, (version, None))[0] == version, package


def test_what_builds_a_wheel_is_locked() -> None:
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(locked("build")[canonicalize_name(requirement.name)][0]), requirement.name


def test_make_installs_packages_by_hash_alone() -> None:
    lines = re.findall(
        r"^(?:\t.*pip install.*|[A-Z]+ := .*(?:pip install|\$\(PIP\)).*)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert lines
    for line in lines:
        allowed = "--require-hashes" in line or "$(TORCH)" in line or line.startswith("PIP := ") or "--editable ." in line
        assert allowed, line


def _requires(name: str, version: str) -> list[str]:
    """Return the requirements of a package, or nothing if this version is not installed here."""
    try:
        return (metadata.requires(name) or []) if metadata.version(name) == version else []
    except metadata.PackageNotFoundError:
        return []
