"""Rules for the sources: imports, sizes, names of classes, and the `Args:` sections of docstrings.

Packages are ordered, there are no cycles, and each heavy library is imported in one place.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from helpers.source_imports import MODULES, ROOT, imported_names, sources

HEAVY = {
    "torch", "transformers", "modelopt", "mlflow", "onnx", "onnxruntime", "onnxscript", "scipy", "pandas", "triton", "gguf",
    "tensorrt_rtx",
}  # fmt: skip

PACKAGES = (
    "plugins",
    "stages.core",
    "stages.policies",
    "stages.workloads",
    "stages.checkpoints",
    "stages.checkpoints.gguf",
    "stages.checkpoints.intake",
    "stages.verdict",
    "stages.verdict.gates",
    "stages.engines",
    "stages.engines.paged",
    "stages.engines.reference",
    "stages.engines.cuda",
    "stages.engines.torch",
    "stages.engines.onnx",
    "stages.engines.tensorrt",
    "stages.engines.interpreter",
    "stages.engines.trtllm",
    "stages.engines.vllm",
    "stages.engines.sglang",
    "stages.engines.llamacpp",
    "stages.quantize",
    "stages.evaluate.distances",
    "stages.evaluate.inputs",
    "stages.evaluate.decoding",
    "stages.evaluate.conformance",
    "stages.evaluate",
    "stages.planning",
    "stages.tiny",
    "stages.report",
    "pipeline.store",
    "pipeline.config",
    "pipeline.registry",
    "pipeline.evidence",
    "pipeline.cli",
    "pipeline.chain",
    "pipeline.api",
    "pipeline.lm_eval",
    "pipeline.__main__",
    "benchmarks",
    "examples",
)
"""Packages in order: a module may import from its own package and earlier packages, but not from later ones."""


def imported_modules(module: str) -> set[str]:
    """Return the modules of this repository that a module imports."""
    return {name for name in imported_names(MODULES[module]) if name in MODULES}


def package_of(module: str) -> str:
    """Return the innermost package of PACKAGES that contains a module."""
    packages = [package for package in PACKAGES if module == package or module.startswith(f"{package}.")]
    assert packages or module in ("pipeline", "stages"), f"{module} is in no package: add it to PACKAGES"
    # the modules `pipeline` and `stages` themselves rank just above the plugins
    return max(packages, key=len) if packages else PACKAGES[1]


def importers(library: str) -> list[str]:
    """Return the files of this repository that import a library."""
    paths = (path for name, path in MODULES.items() if not name.startswith("benchmarks"))
    return [
        str(path.relative_to(ROOT)) for path in paths if any(name.split(".")[0] == library for name in imported_names(path))
    ]


def test_no_package_imports_a_later_package() -> None:
    for module in MODULES:
        place = PACKAGES.index(package_of(module))
        above = {name for name in imported_modules(module) if PACKAGES.index(package_of(name)) > place}
        assert not above, f"{module} ({package_of(module)}) imports {sorted(above)}"


def test_there_are_no_import_cycles() -> None:
    TopologicalSorter({module: imported_modules(module) for module in MODULES}).prepare()


def test_only_backends_are_imported_by_name() -> None:
    """Only these modules call `import_module`: to load backends, their configurations, and the modules of their bundles."""
    dynamic = {name for name in MODULES if "import_module(" in MODULES[name].read_text("utf-8") and ".worker." not in name}
    assert dynamic == {"stages.engines.backend", "stages.engines.config", "stages.engines.interpreter.backend"}


def arithmetic_library(module: str) -> str | None:
    """Return the library of a module with the arithmetic of a number format: torch or onnx; None for other modules."""
    name = module.rsplit(".", maxsplit=1)[-1]
    return {"arithmetic_torch": "torch", "arithmetic_onnx": "onnx"}.get(name)


def test_the_reference_engine_does_not_share_arithmetic_with_onnx() -> None:
    for name in MODULES:
        used = {arithmetic_library(module) for module in imported_modules(name)} - {None}
        assert arithmetic_library(name) is None or used <= {arithmetic_library(name)}, name
        assert not used or not name.startswith(("pipeline", "plugins")), name
    reached = {"stages.engines.reference.engine"}
    while added := set[str]().union(*map(imported_modules, reached)) - reached:
        reached |= added
    assert not [name for name in reached if name.startswith("stages.engines.onnx")]


def test_heavy_libraries_are_imported_in_one_place() -> None:
    for library in ("modelopt", "mlflow", "onnxruntime", "tensorrt_llm", "tensorrt_rtx", "gguf", "model_signing"):
        assert len({Path(name).parent for name in importers(library)}) == 1, importers(library)
    assert set(importers("tensorrt")) == {"plugins/kv_attention/tensorrt_plugin.py", "stages/engines/tensorrt/library.py"}


LIGHT_PROGRAM = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
from pipeline.config.compose import plan
from stages.engines.config import backend_configs
from stages.engines.backend import open_backend

for name in backend_configs():
    open_backend(plan([f"backend={name}"], False).jobs[0].backend)
print(*sys.modules)
import stages.evaluate.joining  # with scipy, for its bounds
assert not {"torch", "transformers"} & set(sys.modules)
"""
"""Imports the modules given as arguments, opens every backend, and prints the imported modules."""
LIGHT_MODULES = {
    *("stages.checkpoints.gguf.model", "plugins.kv_attention.layout", "stages.evaluate.inputs.tokens"),
    *(name for name in MODULES if name.startswith("pipeline") and not name.startswith("pipeline.lm_eval")),
} - {"pipeline.registry.mlflow_store"}
"""The pipeline, and modules of stages and plugins that must be fast to import."""


def test_light_modules_import_no_heavy_library() -> None:
    """A configuration error must not wait for the import of torch."""
    command = [sys.executable, "-c", LIGHT_PROGRAM, *sorted(LIGHT_MODULES)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert HEAVY.isdisjoint(name.split(".")[0] for name in loaded)


PRODUCT = ("pipeline", "stages", "plugins")
ARGUMENTS = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.M)
MAX_FUNCTION, MAX_FILE = 60, 400
"""Maximum lines: of a function with its signature and docstring, without decorators; of a file."""
FAKES = {"Engine", "LLM"}
"""Names of classes of SGLang and TensorRT-LLM, which the fakes of these libraries must have."""

SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (*PRODUCT, "tests", "benchmarks")
    for path in sources(folder)
}
NODES = {name: list(ast.walk(ast.parse(source))) for name, source in SOURCES.items()}


def test_functions_and_files_are_short() -> None:
    long = [name for name, source in SOURCES.items() if source.count("\n") > MAX_FILE]
    for name, nodes in NODES.items():
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{name}: {node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION]
    assert long == []


def test_no_two_classes_share_a_name() -> None:
    counts = Counter(node.name for nodes in NODES.values() for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} == FAKES


def test_documented_parameters_exist() -> None:
    wrong = []
    for name, nodes in NODES.items():
        for node in nodes if name.startswith(PRODUCT) else ():
            if isinstance(node, ast.FunctionDef):
                section = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
                names = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
                documented = [argument for line in ARGUMENTS.findall(section) for argument in line.split(", ")]
                missing = [argument for argument in documented if argument not in names]
                wrong += [f"{name}: {node.name} has no parameter {argument}" for argument in missing]
    assert wrong == []
