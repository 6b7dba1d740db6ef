"""Every import is declared, the locks are complete, by hash and in range, and the Dockerfile installs nothing else."""

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

from pipeline.config.compose import plan
from stages.core.redaction import secret_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "requirements"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
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
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = []
    for requirement in map(Requirement, lines):
        inner = tuple(sorted(requirement.extras)) if requirement.name == "kvgate" else ()
        found += wanted(inner) if inner else [requirement]
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_the_project_and_its_packages_require(name: str) -> None:
    versions = locked(name)
    for requirement in wanted(EXTRAS[name]):
        if requirement.name != "torch":  # torch is installed first, by version, because its build depends on the machine
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)][0]), requirement.name
    for package, (version, marker) in versions.items():
        if marker is None or marker.evaluate():
            for line in _requires(package, version):
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(needed.name) in {*versions, "torch"}, f"{package} needs {needed.name}"


def test_other_locks_have_tested_versions_and_build_tools() -> None:
    tested, build = locked("test"), locked("build")
    for name in ("run", "demo", "build"):
        for package, (version, _) in locked(name).items():
            assert tested.get(package, (version, None))[0] == version, package
    for requirement in map(Requirement, PYPROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(build[canonicalize_name(requirement.name)][0]), requirement.name


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


OURS = {"pipeline", "stages", "plugins", "conf"}

ELSEWHERE = {
    *("kvgate_channel", "kvgate_forcing", "kvgate_rows", "kvgate_sglang_forcing", "kvgate_vllm_cache", "kvgate_vllm_forcing"),
    *("kvgate_worker", "llama_cpp", "sglang", "tensorrt", "tensorrt_llm", "vllm"),
}
"""TensorRT, which NVIDIA installs, libraries that run in interpreters of their own, and the modules of their workers."""
NOT_LOCKED = {"ray"}
"""Distributions in an extra of the same name that the locks do not install: ray requires older cloudpickle and joblib."""


def imported() -> set[str]:
    """Return canonical names of the distributions that the packages import."""
    owners = metadata.packages_distributions()
    sources = [path for name, path in MODULES.items() if not name.startswith("benchmarks")]
    modules = {name.partition(".")[0] for path in sources for name in imported_names(path)}
    names = set()
    for module in modules - OURS - ELSEWHERE - set(sys.stdlib_module_names) - NOT_LOCKED:
        assert module in owners, f"{module} is imported, and no installed distribution has it"
        # several of mlflow's own distributions provide the module mlflow
        distributions = {canonicalize_name(name) for name in owners[module]}
        names.add(module if module in distributions else min(distributions))
    return names


def brought(names: Iterable[str]) -> set[str]:
    """Return the requirements of the given distributions, which pip installs in fitting versions."""
    lines = [line for name in names for line in metadata.requires(name) or []]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_packages_import_only_declared_distributions() -> None:
    extras = PROJECT["optional-dependencies"]
    own, optional = (
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (
            PROJECT["dependencies"],
            [line for extra in ("rtx", "kernels", "gguf", "lm-eval", "signing") for line in extras[extra]],
        )
    )
    assert not imported() - own - optional - brought(own)


DOCKERFILE = ROOT / "Dockerfile"


def values(word: str) -> list[str]:
    """Return the arguments of all uses of an instruction."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    return re.findall(rf"^\s*{word} (.*)$", "\n".join(lines).replace("\\\n", " "), re.MULTILINE)


def test_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, DOCKERFILE], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_no_secret_is_baked_into_an_image() -> None:
    for pair in (pair for rest in [*values("ENV"), *values("ARG")] for pair in rest.split()):
        assert not secret_name(pair.partition("=")[0]), pair


def test_an_image_installs_only_what_is_locked_by_hash() -> None:
    steps = [step.strip() for rest in values("RUN") for step in rest.split("&&")]
    installs = [step for step in steps if re.search(r"\bpip (install|wheel) ", step) and "--target /build/" not in step]
    assert installs
    for step in installs:
        locked = "--require-hashes -r /build/" in step
        given = "torch==" in step or "kvgate-*.whl" in step or step.endswith("--wheel-dir /dist .")
        assert locked or (given and "--no-deps" in step), step


def test_the_preset_interpreter_is_the_default_of_backend_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(*overrides: str) -> object:
        return plan(["backend=trtllm", "stage=build", *overrides], multirun=False).jobs[0].model_dump()["backend"]["python"]

    assert python() is None
    monkeypatch.setenv("KVGATE_TRTLLM_PYTHON", "/usr/bin/python3")
    assert "KVGATE_TRTLLM_PYTHON=/usr/bin/python3" in " ".join(values("ENV"))
    assert python() == "/usr/bin/python3"
    assert python("backend.python=/opt/other") == "/opt/other"
