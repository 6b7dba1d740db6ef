"""The examples are named, compose, and the CI workflow is pinned; tests/long/test_ci_workflow.py runs its steps."""

import json
import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import yaml

from pipeline.config.compose import plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WORKFLOW = (EXAMPLES / "ci" / "github-actions.yml").read_text(encoding="utf-8")
JOB: dict[str, Any] = yaml.safe_load(WORKFLOW)
STEPS: list[dict[str, Any]] = JOB["jobs"]["judge"]["steps"]
NAMED = {step["name"]: step for step in STEPS if "name" in step}


def test_every_command_of_the_ci_job_composes() -> None:
    commands = re.findall(r"python -m pipeline ([^;\n]*)", "\n".join(step["run"] for step in NAMED.values()))
    assert len(commands) == 4
    variables = {**JOB["env"], "SIGNING": ""}
    for command in commands:
        given = shlex.split(Template(command).substitute(variables))
        if "--config-dir" in given:
            place = given.index("--config-dir")
            given[place : place + 2] = [f"hydra.searchpath=[file://{ROOT / given[place + 1]}]"]
        assert plan([argument for argument in given if argument != "-m"], "-m" in given).jobs


def test_a_refusal_stops_the_ci_job_before_it_promotes() -> None:
    """GitHub runs `bash -e`, and a step without `always()` only after those before it succeeded."""
    names = list(NAMED)
    assert names.index("Judge") < names.index("Promote") < names.index("Try the champion") < names.index("Step summary")
    assert [name for name, step in NAMED.items() if "always()" in step.get("if", "")] == ["Step summary"]
    assert "continue-on-error" not in WORKFLOW
    for name in ("Judge", "Promote", "Roll back"):
        assert not re.search(r"\|\||set \+e", NAMED[name]["run"])


def test_the_ci_job_may_only_read_and_runs_actions_that_cannot_be_moved() -> None:
    assert JOB["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)(.*)", WORKFLOW)
    assert len(used) == 4
    for action, comment in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), "the release that the commit is of"
    for step in STEPS:
        assert "${{" not in step.get("run", ""), "an expression in a script runs as code"


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and name != "README.md"}
    assert files == set(re.findall(r"\]\((?!\.\.)([\w./-]+)\)", text))


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "kvgate.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
