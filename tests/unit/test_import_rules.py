"""Who may import whom: pipeline stays light, plugins stand alone, heavy libraries have one door each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "modelopt", "mlflow", "onnx", "onnxruntime", "onnxscript", "scipy", "pandas", "matplotlib"}


def imports(path: Path) -> set[str]:
    """Dotted names that a source file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no sources in {package}"
    return found


def importers(library: str) -> list[str]:
    files = [path for package in ("pipeline", "stages", "plugins") for path in sources(package)]
    return [str(f.relative_to(ROOT)) for f in files if any(name.split(".")[0] == library for name in imports(f))]


@pytest.mark.parametrize("path", sources("pipeline"), ids=lambda p: p.name)
def test_pipeline_imports_neither_stages_nor_plugins_nor_torch(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"stages", "plugins", "torch"})


@pytest.mark.parametrize("path", sources("plugins"), ids=lambda p: p.name)
def test_plugins_import_nothing_of_ours_but_themselves(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"stages", "pipeline"})


@pytest.mark.parametrize("library", ["modelopt", "mlflow", "onnxruntime", "tensorrt_llm"])
def test_a_heavy_library_has_exactly_one_door(library: str) -> None:
    assert len(importers(library)) == 1, importers(library)


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    program = "import sys, pipeline.__main__; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert HEAVY.isdisjoint(result.stdout.split())
