"""Prints every file of the code with the first line of its docstring: `python docs/tree.py [FOLDER ...]`."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeline", "stages", "plugins", "benchmarks", "examples")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty without one."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def lines(folder: Path) -> list[str]:
    """Return a line for the folder, for each of its modules, and for each folder of modules in it, indented by depth."""
    indent = "  " * len(folder.relative_to(ROOT).parts)
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and any(path.rglob("*.py"))]
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    own = f"{indent[2:]}{folder.name}/"
    about = first_line(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    found = [f"{own:40}{about}".rstrip()]
    found += [f"{indent + path.name:40}{first_line(path)}" for path in modules]
    return found + [line for path in inner for line in lines(path)]


if __name__ == "__main__":
    for name in sys.argv[1:] or FOLDERS:
        print(*lines(ROOT / name), sep="\n")
