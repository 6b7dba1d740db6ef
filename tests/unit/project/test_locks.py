"""Every import is declared, the locks are complete and in range, and installations are locked by hash."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from helpers.source_imports import MODULES, imported_names
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stages.core.redaction import secret_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "requirements"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = {"run": ("gguf", "postgres"), "demo": ("rtx",), "test": ("test", "postgres")}
"""Lock -> its extras in addition to the dependencies, as in `requirements/lock`."""


def locked_packages(name: str) -> dict[str, tuple[str, Marker | None]]:
    """Return the packages of a lock: name -> (version, marker)."""
    packages: dict[str, tuple[str, Marker | None]] = {}
    for line in (LOCKS / f"{name}.lock").read_text().splitlines():
        if not line.startswith(" "):
            requirement = Requirement(line.removesuffix("\\").strip())
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            packages[canonicalize_name(requirement.name)] = (pin.version, requirement.marker)
    return packages


def required_by(extras: tuple[str, ...]) -> list[Requirement]:
    """Return the requirements of the project and of extras, recursively."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    requirements = []
    for requirement in map(Requirement, lines):
        inner = tuple(sorted(requirement.extras)) if requirement.name == "kvgate" else ()
        requirements += required_by(inner) if inner else [requirement]
    return requirements


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_contains_all_requirements(name: str) -> None:
    versions = locked_packages(name)
    for requirement in required_by(EXTRAS[name]):
        if requirement.name != "torch":  # torch is installed first, by version, because its build depends on the machine
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)][0]), requirement.name
    for package, (version, marker) in versions.items():
        if marker is None or marker.evaluate():
            for line in _requires(package, version):
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(needed.name) in {*versions, "torch"}, f"{package} needs {needed.name}"


def test_other_locks_have_the_versions_of_the_test_lock() -> None:
    tested, build = locked_packages("test"), locked_packages("build")
    for name in ("run", "demo", "build"):
        for package, (version, _) in locked_packages(name).items():
            assert tested.get(package, (version, None))[0] == version, package
    for requirement in map(Requirement, PYPROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(build[canonicalize_name(requirement.name)][0]), requirement.name


def test_make_installs_packages_only_by_hash() -> None:
    lines = re.findall(
        r"^(?:\t.*pip install.*|[A-Z]+ := .*(?:pip install|\$\(PIP\)).*)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert lines
    for line in lines:
        allowed = "--require-hashes" in line or "$(TORCH)" in line or line.startswith("PIP := ") or "--editable ." in line
        assert allowed, line


def _requires(name: str, version: str) -> list[str]:
    """Return the requirements of a package; empty if another version is installed."""
    try:
        return (metadata.requires(name) or []) if metadata.version(name) == version else []
    except metadata.PackageNotFoundError:
        return []


OWN_PACKAGES = {"pipeline", "stages", "plugins", "conf"}

EXTERNAL_MODULES = {
    *("kvgate_channel", "kvgate_forcing", "kvgate_rows", "kvgate_sglang_forcing", "kvgate_vllm_cache", "kvgate_vllm_forcing"),
    *("kvgate_worker", "llama_cpp", "sglang", "tensorrt", "tensorrt_llm", "vllm"),
}
"""TensorRT, which is installed from NVIDIA, libraries in separate interpreters, and the modules of their workers."""
NOT_LOCKED = {"ray"}
"""Distributions in an extra of the same name that the locks do not install: ray requires older cloudpickle and joblib."""


def imported_distributions() -> set[str]:
    """Return the canonical names of the distributions that the packages import."""
    owners = metadata.packages_distributions()
    sources = [path for name, path in MODULES.items() if not name.startswith("benchmarks")]
    modules = {name.partition(".")[0] for path in sources for name in imported_names(path)}
    names = set()
    for module in modules - OWN_PACKAGES - EXTERNAL_MODULES - set(sys.stdlib_module_names) - NOT_LOCKED:
        assert module in owners, f"{module} is imported, and no installed distribution has it"
        # several distributions of MLflow provide the module mlflow
        distributions = {canonicalize_name(name) for name in owners[module]}
        names.add(module if module in distributions else min(distributions))
    return names


def requirements_of(names: Iterable[str]) -> set[str]:
    """Return the names of the distributions that the given distributions require."""
    lines = [line for name in names for line in metadata.requires(name) or []]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_packages_import_only_declared_distributions() -> None:
    extras = PROJECT["optional-dependencies"]
    direct, optional = (
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (
            PROJECT["dependencies"],
            [line for extra in ("rtx", "kernels", "gguf", "lm-eval", "signing") for line in extras[extra]],
        )
    )
    assert not imported_distributions() - direct - optional - requirements_of(direct)


DOCKERFILE = ROOT / "Dockerfile"


def arguments_of(instruction: str) -> list[str]:
    """Return the arguments of every occurrence of a Dockerfile instruction."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    return re.findall(rf"^\s*{instruction} (.*)$", "\n".join(lines).replace("\\\n", " "), re.MULTILINE)


WORKFLOWS = [*ROOT.glob(".github/workflows/*.yml"), ROOT / "examples" / "ci" / "github-actions.yml"]


# actionlint runs without shellcheck, because not every machine has it, and steps split variables into arguments on purpose.
@pytest.mark.parametrize(("linter", "arguments"), [("hadolint", [DOCKERFILE]), ("actionlint", ["-shellcheck=", *WORKFLOWS])])
def test_dockerfile_and_workflows_pass_their_linters(linter: str, arguments: list[str | Path]) -> None:
    command = [Path(sys.executable).with_name(linter), *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_the_image_contains_no_secret() -> None:
    for pair in (pair for line in [*arguments_of("ENV"), *arguments_of("ARG")] for pair in line.split()):
        assert not secret_name(pair.partition("=")[0]), pair


def test_the_image_installs_only_packages_locked_by_hash() -> None:
    steps = [step.strip() for line in arguments_of("RUN") for step in line.split("&&")]
    installs = [step for step in steps if re.search(r"\bpip (install|wheel) ", step) and "--target /build/" not in step]
    assert installs
    for step in installs:
        by_hash = "--require-hashes -r /build/" in step
        is_torch_or_kvgate = "torch==" in step or "kvgate-*.whl" in step or step.endswith("--wheel-dir /dist .")
        assert by_hash or (is_torch_or_kvgate and "--no-deps" in step), step
