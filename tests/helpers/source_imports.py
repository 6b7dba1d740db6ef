"""The modules of this repository, and the names that their sources import."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources in {package}"
    return files


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for package in ("pipeline", "stages", "plugins", "benchmarks") for path in sources(package)}


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a source file imports at any depth, including inside functions and for type checkers."""
    names = list[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; this repository uses absolute imports"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in MODULES else str(node.module) for name in members]
    return tuple(names)
