"""Claims of README and docs that go stale by themselves: the tree, tables, links, paths and commands."""

import ast
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import yaml

from pipeline.config.compose import plan
from pipeline.config.config import Stage
from pipeline.core.errors import DEFECT, EXIT_CODES, INTERRUPTED
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.verdict.gates import Gates

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "plugins")),
]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
POLICIES = [path.stem for path in sorted((ROOT / "conf" / "kv").glob("*.yaml"))]
NOT_OPTIONS = {"workloads/base"}
"""Files of conf/ that others include."""


def first_cells(document: str, header: str) -> set[str]:
    """Code names in the first column of the table whose header begins with `header`."""
    table = TEXT[document].partition(f"| {header} |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `([\w.]+)=?`", table, re.MULTILINE))


def test_the_tree_has_a_line_for_every_file() -> None:
    printed = subprocess.run([sys.executable, ROOT / "docs" / "tree.py"], capture_output=True, text=True, check=True).stdout
    described = re.findall(r"^ *([\w.]+\.py) +\S", printed, re.MULTILINE)
    folders = ("pipeline", "stages", "plugins", "benchmarks", "examples")
    modules = [path.name for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    assert sorted(described) == sorted(modules)


def test_the_table_of_policies_is_the_policies_own_arithmetic() -> None:
    shape = KVShape(layers=32, kv_heads=8, head_dim=128)
    pattern = r"^\| `(\w+)` \|.*\| ([\d.]+)(?: \(the baseline\)| and the window)? \|$"
    rows = dict(re.findall(pattern, TEXT["docs/policies.md"], re.MULTILINE))
    assert set(rows) == set(POLICIES)
    for name in POLICIES:
        policy = KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{name}.yaml").read_text()))
        assert f"{policy.bytes_per_token(shape) / 1024:.4g}" == rows[name], name


@pytest.mark.parametrize("document", ["README.md", "docs/cli.md"])
def test_every_exit_code_is_documented_and_no_other(document: str) -> None:
    rows = re.findall(r"^\| (\d+) \|", TEXT[document].partition("| exit code |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(map(int, rows)) == sorted({0, DEFECT, INTERRUPTED, *EXIT_CODES.values()})
    assert len(set(rows)) == len(rows)


def test_every_stage_backend_and_weights_format_is_documented_and_no_other() -> None:
    assert first_cells("docs/cli.md", "`stage=`") == set(get_args(Stage))
    assert first_cells("docs/backends.md", "`backend=`") == {path.stem for path in (ROOT / "conf" / "backend").glob("*.yaml")}
    assert first_cells("docs/backends.md", "`weights=`") == set(get_args(WeightsFormat))


def test_every_group_and_option_is_documented_and_no_other() -> None:
    table = TEXT["docs/cli.md"].partition("| group | options |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)=` \| (.*) \|$", table, re.MULTILINE))
    files = [path.relative_to(ROOT / "conf").with_suffix("").as_posix() for path in (ROOT / "conf").glob("*/*.yaml")]
    options = [name.split("/") for name in files if name not in NOT_OPTIONS]
    assert set(rows) == {group for group, _ in options}
    for group, cell in rows.items():
        listed = set(re.findall(r"(?<!\[)`(\w+)`", cell))
        elsewhere = {"kv": set(POLICIES), "backend": first_cells("docs/backends.md", "`backend=`")}
        assert (listed or elsewhere[group]) == {option for of, option in options if of == group}, group


def test_thresholds_that_are_named_exist() -> None:
    named = set(re.findall(r"gates\.(\w+)", "".join(text for name, text in TEXT.items() if name.startswith("docs/"))))
    assert named - {"py"} <= Gates.model_fields.keys()


@pytest.mark.parametrize("document", sorted(TEXT))
def test_every_relative_link_leads_somewhere(document: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXT[document]):
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("document", sorted(TEXT.keys() - {"CHANGELOG.md"}))
def test_every_path_that_is_named_exists(document: str) -> None:
    folders = "pipeline|stages|plugins|benchmarks|examples|conf|docs|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", TEXT[document]):
        assert "NAME" in name or (ROOT / name).exists() or (ROOT / document).parent.joinpath(name).exists(), name


def commands() -> list[tuple[str, str]]:
    """Every `python -m pipeline ...` in a block or in a line, without its comment, and the first document that has it."""
    first: dict[str, str] = {}
    for document, text in TEXT.items():
        joined = text.replace("\\\n", " ")
        for line in re.findall(r"(?:^|[`\s])python -m pipeline +([^`\n]*)", joined, re.MULTILINE):
            arguments = re.split(r" +#| {3,}", line)[0].strip()
            if "=" in arguments and not arguments.startswith("[") and document != "CHANGELOG.md":
                first.setdefault(arguments, document)
    return [(document, command) for command, document in first.items()]


@pytest.mark.parametrize(("document", "command"), commands(), ids=lambda value: value)
def test_every_command_composes(document: str, command: str) -> None:
    arguments = shlex.split(command.replace("NAME", "int8").replace("[...]", ""))
    multirun = "-m" in arguments
    arguments = [argument for argument in arguments if argument not in ("-m", "--json")]
    if "--config-dir" in arguments:
        place = arguments.index("--config-dir")
        directory = ROOT / arguments[place + 1]
        arguments[place : place + 2] = [f"hydra.searchpath=[file://{directory}]"]
    assert plan(arguments, multirun).jobs, document


def test_the_python_of_the_readme_imports_what_exists() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TEXT["README.md"], re.DOTALL)
    for node in ast.parse(program).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("pipeline", "stages"):
            imported = import_module(str(node.module))
            assert {alias.name for alias in node.names} <= set(dir(imported)), node.module


def test_torch_is_the_same_everywhere() -> None:
    """The version that is installed before kvgate, so that pip does not bring several GB of CUDA."""
    (pinned,) = set(re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    places = [*TEXT.values(), (ROOT / "examples" / "ci" / "github-actions.yml").read_text(encoding="utf-8")]
    assert {version for text in places for version in re.findall(r"torch==([\d.]+)", text)} == {pinned}
