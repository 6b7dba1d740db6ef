"""The `Args:` sections of docstrings name existing parameters."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.M)


def test_documented_parameters_exist() -> None:
    wrong = []
    for path in (path for folder in ("pipeline", "stages", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                section = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
                names = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
                documented = [name for line in ARGUMENTS.findall(section) for name in line.split(", ")]
                missing = [name for name in documented if name not in names]
                wrong += [f"{path.relative_to(ROOT)}: {node.name} has no parameter {name}" for name in missing]
    assert wrong == []
