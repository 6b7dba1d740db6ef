"""README's claims that go stale by themselves: the tree, the table of policies, the commands."""

import re
from pathlib import Path

import yaml

from pipeline.core.kv import KVPolicy, KVShape

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.split("## The way through the code")[1]


def test_the_two_commands_stand_first() -> None:
    assert README.index("make demo") < README.index("make test") < 500


def tree_files(tree: str) -> set[str]:
    """Paths of the Python files that a tree names, from its indentation."""
    found, folders = set(), ["", "", ""]
    for indent, name in re.findall(r"^( *)([\w.]+/?)  ", tree, re.MULTILINE):
        depth = len(indent) // 2
        if name.endswith("/"):
            folders[depth + 1 :] = [folders[depth] + name] + [""] * (1 - depth)
        elif name.endswith(".py"):
            found.add(folders[depth] + name)
    return found


def test_the_tree_names_every_file_and_none_that_is_gone() -> None:
    folders = ("pipeline", "stages", "benchmarks")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if p.name != "__init__.py"]
    assert tree_files(TREE) == {p.relative_to(ROOT).as_posix() for p in paths}


def test_the_plugins_own_tree_names_every_file_and_none_that_is_gone() -> None:
    tree = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8").split("```")[1]
    paths = [p for p in (ROOT / "plugins").rglob("*.py") if p.name != "__init__.py"]
    assert tree_files(tree) == {p.relative_to(ROOT / "plugins").as_posix() for p in paths}


def test_the_table_of_policies_is_the_policies_own_arithmetic() -> None:
    shape = KVShape(layers=32, kv_heads=8, head_dim=128)
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+)(?: \(the baseline\)| and the window)? \|$", README, re.MULTILINE))
    files = sorted((ROOT / "conf" / "kv").glob("*.yaml"))
    assert set(rows) == {path.stem for path in files}
    for path in files:
        policy = KVPolicy.model_validate(yaml.safe_load(path.read_text()))
        assert f"{policy.bytes_per_token(shape) / 1024:.4g}" == rows[path.stem], path.stem
