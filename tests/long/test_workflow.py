"""The example workflow for a user's repository, run unchanged: it installs a commit and judges that repository's model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FEW = (
    "workloads.stress_test={max_tokens:128,decode_steps:8,offset_steps:1,max_batch:2,requests:2} calibration.samples=1 "
    "workloads.load={batch:2,context_tokens:64,new_tokens:8}"
)
PIP = f"""#!/bin/sh
echo "$*" >> "$PIP_LOG"
case "$*" in *git+*) exec {sys.executable} -m pip "$@" -q --no-deps --no-build-isolation --target "$SITE";; esac
"""
"""A pip that logs its arguments and installs only kvgate; the dependencies are installed already."""


def test_the_workflow_judges_promotes_and_serves_the_model(tmp_path: Path) -> None:
    repository, site, programs = tmp_path / "repository", tmp_path / "site", tmp_path / "programs"
    shutil.copytree(ROOT / "stages" / "tiny" / "checkpoint", repository / "model")
    shutil.copy(EXAMPLES / "own_samples.jsonl", repository / "questions.jsonl")
    shutil.copy(EXAMPLES / "serve_champion.py", repository)
    programs.mkdir()
    (programs / "pip").write_text(PIP)
    (programs / "pip").chmod(0o755)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    workflow = yaml.safe_load((EXAMPLES / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
    environment = {
        **os.environ,
        **{name: str(value) for name, value in workflow["env"].items() if "${{" not in str(value)},
        "POLICIES": f"int8 {FEW}",  # more policies take minutes
        "GATES": "gates.max_ruined_share=0.1",  # 40 questions cannot show a smaller share
        "KVGATE": f"git+file://localhost{ROOT}@{commit}",
        "PATH": f"{programs}:{site}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "SITE": str(site),
        "PIP_LOG": str(tmp_path / "pip.log"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_ENV": str(tmp_path / "env"),
    }

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for job in ("judge", "promote"):
        steps = {step["name"]: step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step}
        steps.pop("Roll back", None)  # users start a rollback on request
        outputs = {name: shell(script) for name, script in steps.items()}
    assert outputs["Try the champion"] == "04 Bergen 14 Tartu\n"
    assert (tmp_path / "pip.log").read_text().splitlines()[
        1
    ] == f"install kvgate[signing] @ git+file://localhost{ROOT}@{commit}"
    assert json.loads((repository / "work" / "summary.json").read_text())["champion"] is not None
    assert "PASS" in (tmp_path / "summary.md").read_text()
    # Fetch the champion as in docs/registry.md#fetch-the-champion.
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{repository}/work/mlflow.db"
    shell("mlflow artifacts download --artifact-uri models:/kvgate-YOUR-SERVICE@champion --dst-path champion")
    (repository / "champion" / "workloads").mkdir()
    shutil.copy(repository / "questions.jsonl", repository / "champion" / "workloads")
    shell("kvgate stage=verify bundle=champion")
    program = 'from pipeline.api import load; print(load("champion").generate("Copy: 04 Bergen 14 Tartu"))'
    assert shell(f"python -c '{program}'").strip()
