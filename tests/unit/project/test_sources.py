"""Rules for the source of every module: sizes, names of classes, and the `Args:` sections of docstrings."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("pipeline", "stages", "plugins")
ARGUMENTS = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.M)
MAX_FUNCTION, MAX_FILE = 60, 400
"""Maximum lines: of a function with its signature and docstring, without decorators; of a file."""
FAKES = {"Engine", "LLM"}
"""Names of classes of SGLang and TensorRT-LLM, which the fakes of these libraries must have."""

SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (*PRODUCT, "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
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
