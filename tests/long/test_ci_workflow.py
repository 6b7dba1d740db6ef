"""The shell steps of examples/ci/github-actions.yml, run as GitHub runs them in a clone: exit codes, files, the champion."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
SMALL = (
    "workloads.probe={max_tokens:1088,decode_steps:72,offset_steps:4,max_batch:9,requests:100} calibration.samples=1 "
    "workloads.load={batch:2,context_tokens:64,new_tokens:8,warmup_steps:1,budget_gib:1.0,sequence_tokens:1024} "
    "backend.threads=1"
)
"""What makes a run short without changing what it judges."""


@dataclass
class Job:
    """A run of the workflow's job."""

    codes: dict[str, int] = field(default_factory=dict)
    """Exit code of each step that ran."""
    log: str = ""
    summary: str = ""
    """What GitHub shows of it."""
    files: dict[str, str] = field(default_factory=dict)
    """What is uploaded."""

    @property
    def failed(self) -> bool:
        return any(self.codes.values())


def holds(condition: str, event: str, rollback: bool) -> bool:
    """Evaluate the condition of a step, of the few forms that the workflow has."""
    python = re.sub(r"\$\{\{(.*)\}\}", r"\1", condition).replace("&&", " and ").replace("inputs.rollback", str(rollback))
    python = python.replace("github.event_name", repr(event)).replace("always()", "True")
    return bool(eval(re.sub(r"!(?!=)", " not ", python)))


def run_job(clone: Path, event: str, *, rollback: bool = False, before: Any = None, **environment: str) -> Job:
    """Run the steps with a script, but the installation.

    Args:
        clone: The repository.
        event: The name of GitHub's event.
        rollback: The input of that name.
        before: Is called with a step's name before it runs.
        environment: Takes the place of the workflow's own variables.
    """
    temp = clone.parent / "temp"
    temp.mkdir(exist_ok=True)
    given = {name: "" if "secrets." in str(value) else str(value) for name, value in WORKFLOW["env"].items()}
    given["QUESTIONS"] += f" {SMALL}"
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "RUNNER_TEMP": str(temp),
        **given,
        **environment,
    }
    job = Job()
    for step in WORKFLOW["jobs"]["judge"]["steps"]:
        name = step.get("name")
        condition = step.get("if", "")
        runs = holds(condition or "True", event, rollback) and (not job.failed or "always()" in condition)
        if name in (None, "Install kvgate") or not runs:
            continue
        if before is not None:
            before(name)
        (temp / "summary.md").write_text("")
        (temp / "env").write_text("")
        secrets = {key: environment.get("SIGNING_KEY", "") for key in step.get("env", {})}
        script = temp / "step.sh"
        script.write_text(step["run"])
        result = subprocess.run(
            ["bash", "-e", str(script)],
            check=False,
            capture_output=True,
            text=True,
            cwd=clone,
            env={**variables, **secrets, "GITHUB_STEP_SUMMARY": str(temp / "summary.md"), "GITHUB_ENV": str(temp / "env")},
        )
        job.codes[name] = result.returncode
        job.log += f"== {name}\n{result.stdout}{result.stderr}"
        job.summary += (temp / "summary.md").read_text()
        variables |= dict(line.split("=", 1) for line in (temp / "env").read_text().splitlines())
    work = clone / "work"
    job.files = {path.name: path.read_text() for path in work.glob("*.*") if path.suffix in (".txt", ".xml", ".json", ".html")}
    return job


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a checkout of the working tree holds."""
    folder = tmp_path_factory.mktemp("ci") / "kvgate"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith(("tests/", "benchmarks/", "docs/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def first(clone: Path) -> Job:
    """A push that makes the first champion, signed."""
    key = subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519"], check=True, capture_output=True, text=True).stdout
    return run_job(clone, "push", POLICIES="int8", SIGNING_KEY=key)


@pytest.fixture(scope="module")
def refused(clone: Path, first: Job) -> Job:
    """A pull request with a policy that does not hold up."""
    assert not first.failed, first.log
    return run_job(clone, "pull_request", POLICIES="int4_tensor")


def suites(job: Job) -> dict[str, ElementTree.Element]:
    return {suite.attrib["name"]: suite for suite in ElementTree.fromstring(job.files["junit.xml"]).iter("testsuite")}


def test_a_push_with_a_policy_that_holds_up_promotes_it(first: Job) -> None:
    assert first.codes == dict.fromkeys(("Signing key", "Judge", "Promote", "Try the champion", "Step summary"), 0), first.log
    summary = json.loads(first.files["summary.json"])
    assert (summary["champion"], summary["exit_code"]) == ("int8", 0)
    assert summary["candidates"][0]["signed_by"] is not None
    assert "Champion: int8 (version 1) is the champion" in first.summary
    assert first.summary.startswith("### KV caches\n```\n")
    assert "04 Bergen 14 Tartu" in first.log
    (suite,) = suites(first).values()
    assert (suite.attrib["name"], suite.attrib["failures"], suite.attrib["errors"]) == ("tiny int8", "0", "0")


def test_a_pull_request_that_a_gate_refuses_fails_and_the_champion_stays(clone: Path, refused: Job) -> None:
    assert refused.codes == {"Signing key": 0, "Judge": 3, "Step summary": 0}, refused.log
    assert "int4_tensor FAIL" in " ".join(refused.summary.split())
    suite = suites(refused)["tiny int4_tensor"]
    failures = {
        case.attrib["name"]: case.find("failure") for case in suite.iter("testcase") if case.find("failure") is not None
    }
    assert "verdict" in failures
    assert {"FAIL"} <= {failure.attrib["type"] for failure in failures.values() if failure is not None}
    assert int(suite.attrib["failures"]) == len(failures)
    assert champion_of(clone) == "int8"


def champion_of(clone: Path) -> str:
    program = "import sys; from pipeline.api import champion; print(champion('tiny').policy.name)"
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=clone, env=environment
    )
    return result.stdout.strip()


def test_a_champion_that_is_not_what_was_judged_goes_back_and_so_does_one_by_hand(clone: Path, refused: Job) -> None:
    assert refused.failed

    def alter(step: str) -> None:
        if step == "Try the champion":
            summary = json.loads((clone / "work" / "summary.json").read_text())
            best = next(one for one in summary["candidates"] if one["name"] == summary["champion"])
            policy = Path(best["engine"]["path"]) / "kv_policy.json"
            content = policy.read_bytes()
            policy.unlink()  # its other names keep what they hold
            policy.write_bytes(content + b"\n")

    job = run_job(clone, "push", before=alter)
    assert job.codes == {"Signing key": 0, "Judge": 0, "Promote": 0, "Try the champion": 3, "Step summary": 0}, job.log
    assert "int8 (version 1) is the champion again" in job.log
    assert champion_of(clone) == "int8"
    by_hand = run_job(clone, "workflow_dispatch", rollback=True)
    assert by_hand.codes["Roll back"] == 2, "there is nothing left to go back to"
    assert "Judge" not in by_hand.codes
