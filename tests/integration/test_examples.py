"""The examples do what they say, in one work directory: the CI job judges and promotes, the champion is served."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = [
    "workloads.probe={max_tokens: 1088, decode_steps: 72, offset_steps: 4, max_batch: 9, requests: 100}",
    "calibration.samples=1",
    "backend.threads=1",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
]
"""What makes a run short without changing what it judges."""


def steps() -> dict[str, dict[str, Any]]:
    """Named steps of the CI example."""
    workflow = yaml.safe_load((EXAMPLES / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
    return {step["name"]: step for step in workflow["jobs"]["judge"]["steps"] if "name" in step}


def run(arguments: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{work / 'mlflow.db'}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=400)


def run_step(name: str, work: Path) -> subprocess.CompletedProcess[str]:
    """Run the one command of a step of the CI example, in another work directory and with less to time."""
    program, *arguments = shlex.split(steps()[name]["run"].replace("\\\n", " "))
    assert program == "python"
    return run([*arguments, *SMALL, f"workdir={work}"], work)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory in which the CI example has judged an own policy on own samples, and promoted it."""
    work = tmp_path_factory.mktemp("examples") / "work"
    for name in ("Judge", "Promote"):
        result = run_step(name, work)
        assert result.returncode == 0, result.stderr
    return work


def test_the_ci_job_judges_the_own_policy_on_the_own_samples_and_promotes_it(work: Path) -> None:
    summary = json.loads((work / "summary.json").read_text())
    (candidate,) = summary["candidates"]
    assert (candidate["policy"], candidate["verdict"]) == ("fp8k_int4v_careful", "PASS"), candidate["reasons"]
    assert (summary["champion"], summary["exit_code"]) == ("fp8k_int4v_careful", 0)
    lines = [json.loads(line) for line in (EXAMPLES / "own_samples.jsonl").read_text().splitlines()]
    (report,) = (work / "artifacts").glob("evaluate/*/samples.jsonl")
    assert len(report.read_text().splitlines()) == len(lines)


def test_the_champion_is_verified_and_generates_text(work: Path) -> None:
    text = "Bremen 04 Bergen 14 Tartu Hanna 55 ladder 61 40 93 95 39 90 28 62 Vera"
    result = run(["examples/serve_champion.py", f"Copy:\n{text}", "--samples", "examples/own_samples.jsonl"], work)
    assert result.returncode == 0, result.stderr
    assert "kvgate-tiny version 1: fp8k_int4v_careful, PASS" in result.stderr
    assert result.stdout == f"{text}\n"


def test_a_champion_with_another_identity_is_not_served(work: Path) -> None:
    (identity,) = (work / "mlartifacts").rglob("identity.json")
    kept = identity.read_bytes()
    identity.write_bytes(kept + b"\n")
    try:
        result = run(["examples/serve_champion.py", "Copy:\n04"], work)
    finally:
        identity.write_bytes(kept)
    assert (result.returncode, result.stdout) == (1, "")
    assert "identity.json of version 1 is not the one that the registry cites" in result.stderr


def test_a_refusal_stops_the_ci_job_before_it_promotes() -> None:
    """GitHub runs `bash -e`, and a step without `if: always()` or `|| true` only after those before it succeeded."""
    assert steps()["Promote"]["if"] == "github.event_name == 'push'"
    assert list(steps()).index("Judge") < list(steps()).index("Promote")
    for step in steps().values():
        assert not re.search(r"\|\||set \+e|continue-on-error", json.dumps(step))


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and name != "README.md"}
    assert files == set(re.findall(r"\]\(([\w./-]+)\)", text))
