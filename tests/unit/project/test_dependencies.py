"""pyproject.toml declares every distribution that the packages import."""

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_import_rules import MODULES, imported_names

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"pipeline", "stages", "plugins", "conf"}

ELSEWHERE = {
    "tensorrt": "NVIDIA's installation on a machine with a GPU; tests bring their own module of that name",
    "tensorrt_llm": "an interpreter of its own: backend.python",
    "kvgate_forcing": "next to stages/engines/trtllm/worker/kvgate_worker.py, which runs in that interpreter",
    "kvgate_worker": "likewise",
    "vllm": "an interpreter of its own: backend.python",
    "kvgate_vllm_forcing": "next to stages/engines/vllm/worker/kvgate_vllm_worker.py, which runs in that interpreter",
    "kvgate_vllm_cache": "likewise",
    "llama_cpp": "an interpreter of its own: backend.python",
    "sglang": "runs in an interpreter of its own: stages/engines/sglang/worker/",
    "kvgate_sglang_forcing": "next to stages/engines/sglang/worker/kvgate_sglang_worker.py, which runs in that interpreter",
    "kvgate_channel": "stages/engines/interpreter/worker, which every such interpreter has on its path",
    "kvgate_rows": "stages/engines/interpreter/worker, which every such interpreter has on its path",
}
NOT_LOCKED = {"ray"}
"""Distributions in an extra of the same name that the locks do not install: ray requires older cloudpickle and joblib."""


def imported() -> set[str]:
    """Return canonical names of the distributions that the packages import."""
    owners = metadata.packages_distributions()
    sources = [path for name, path in MODULES.items() if not name.startswith("benchmarks")]
    modules = {name.partition(".")[0] for path in sources for name in imported_names(path)}
    names = set()
    for module in modules - OURS - set(ELSEWHERE) - set(sys.stdlib_module_names) - NOT_LOCKED:
        assert module in owners, f"{module} is imported, and no installed distribution has it"
        # several of mlflow's own distributions provide the module mlflow
        distributions = {canonicalize_name(name) for name in owners[module]}
        names.add(module if module in distributions else min(distributions))
    return names


def brought(names: Iterable[str]) -> set[str]:
    """Return the requirements of the given distributions, which pip installs in fitting versions."""
    lines = [line for name in names for line in metadata.requires(name) or []]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_the_packages_import_what_is_declared_or_what_a_declared_distribution_brings() -> None:
    extras = PROJECT["optional-dependencies"]
    own, optional = (
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (
            PROJECT["dependencies"],
            [line for extra in ("rtx", "kernels", "gguf", "lm-eval", "signing") for line in extras[extra]],
        )
    )
    assert not imported() - own - optional - brought(own)
