"""The front door: README.md is short, begins with the two commands, and explains its words."""

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = ["forced decode", "canary", "oracle", "KL", "sink", "live tokens", "INCONCLUSIVE"]


def test_the_two_commands_stand_first() -> None:
    assert README.index("make demo") < README.index("make test") < 500


def test_it_is_read_in_one_sitting() -> None:
    assert len(README.splitlines()) <= 150
    assert max(len(line) for line in README.splitlines() if not line.startswith("|")) <= 170


def test_the_glossary_has_seven_words_and_a_sentence_for_each() -> None:
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", README, re.MULTILINE))
    assert list(rows) == WORDS
    for meaning in rows.values():
        assert meaning.endswith(".")
        assert ". " not in meaning, "one sentence each"


def test_its_python_is_python_that_imports_what_exists() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for node in ast.parse(program).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("pipeline", "stages"):
            imported = import_module(str(node.module))
            assert {alias.name for alias in node.names} <= set(dir(imported)), node.module


def test_docs_license_and_contributing_are_linked() -> None:
    targets = set(re.findall(r"\]\(([^)#]+)", README))
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert documents | {"LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"} <= targets
