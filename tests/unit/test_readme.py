"""README's claims that go stale by themselves: the tree, the table of policies, the commands."""

import re
from pathlib import Path

import pytest
import yaml

from pipeline.kv import KVPolicy, KVShape

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.split("## The way through the code")[1]


def test_the_two_commands_stand_first() -> None:
    assert README.index("make demo") < README.index("make test") < 500


@pytest.mark.parametrize(
    "name",
    [p.name for p in sorted((ROOT / "pipeline").glob("*.py")) if p.name != "__init__.py"]
    + [f"{p.name}/" if p.is_dir() else p.name for p in sorted((ROOT / "stages").iterdir()) if not p.name.startswith("_")],
)
def test_the_tree_names_every_file(name: str) -> None:
    assert re.search(rf"(?<![\w/]){re.escape(name)}", TREE), f"{name} is missing in README's tree"


def test_the_tree_names_nothing_that_is_gone() -> None:
    lines = re.findall(r"^  ((?:[\w]+\.py ?)+)", TREE, re.MULTILINE)
    for name in " ".join(lines).split():
        assert (ROOT / "pipeline" / name).is_file() or (ROOT / "stages" / name).is_file(), name


def test_the_table_of_policies_is_the_policies_own_arithmetic() -> None:
    shape = KVShape(layers=32, kv_heads=8, head_dim=128)
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+)(?: \(the baseline\))? \|$", README, re.MULTILINE))
    files = sorted((ROOT / "conf" / "kv").glob("*.yaml"))
    assert set(rows) == {path.stem for path in files}
    for path in files:
        policy = KVPolicy.model_validate(yaml.safe_load(path.read_text()))
        assert policy.bytes_per_token(shape) == int(rows[path.stem]) * 1024
