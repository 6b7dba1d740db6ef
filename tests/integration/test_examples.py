"""The CI workflow runs no action or expression that others can change (tests/long/test_workflow.py runs its commands)."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / "examples" / "ci" / "github-actions.yml").read_text(encoding="utf-8")
JOB: dict[str, Any] = yaml.safe_load(WORKFLOW)
STEPS: list[dict[str, Any]] = JOB["jobs"]["judge"]["steps"]


def test_a_refusal_stops_the_ci_job_before_it_promotes() -> None:
    """GitHub runs `bash -e`, and a step without `always()` only after those before it succeeded."""
    names = [step["name"] for step in STEPS if "name" in step]
    assert names.index("Judge") < names.index("Promote") < names.index("Try the champion") < names.index("Step summary")
    assert [step["name"] for step in STEPS if "name" in step and "always()" in step.get("if", "")] == ["Step summary"]
    assert "continue-on-error" not in WORKFLOW


def test_the_ci_job_may_only_read_and_runs_nothing_that_can_be_moved() -> None:
    assert JOB["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)", WORKFLOW)
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert not any("${{" in step.get("run", "") for step in STEPS), "an expression in a script runs as code"
