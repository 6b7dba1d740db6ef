"""The example workflow for another repository, run unchanged: it installs a commit and judges that repository's model."""

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
echo "$*" >> "$ASKED"
case "$*" in *git+*) exec {sys.executable} -m pip "$@" -q --no-deps --no-build-isolation --target "$SITE";; esac
"""
"""A pip that installs only kvgate. The dependencies are already available."""


def test_the_workflow_judges_promotes_and_serves_the_model(tmp_path: Path) -> None:
    theirs, site, programs = tmp_path / "theirs", tmp_path / "site", tmp_path / "programs"
    shutil.copytree(ROOT / "stages" / "tiny" / "checkpoint", theirs / "model")
    shutil.copy(EXAMPLES / "own_samples.jsonl", theirs / "questions.jsonl")
    shutil.copy(EXAMPLES / "serve_champion.py", theirs)
    programs.mkdir()
    (programs / "pip").write_text(PIP)
    (programs / "pip").chmod(0o755)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    workflow = yaml.safe_load((EXAMPLES / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
    environment = {
        **os.environ,
        **{name: str(value) for name, value in workflow["env"].items() if "${{" not in str(value)},
        "POLICIES": f"int8 {FEW}",  # more policies take minutes
        "KVGATE": f"git+file://localhost{ROOT}@{commit}",
        "PATH": f"{programs}:{site}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "SITE": str(site),
        "ASKED": str(tmp_path / "asked"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_ENV": str(tmp_path / "env"),
    }

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=theirs, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    steps = {step["name"]: step["run"] for step in workflow["jobs"]["judge"]["steps"] if "run" in step}
    del steps["Roll back"]  # users start a rollback on request
    said = {name: shell(script) for name, script in steps.items()}
    assert said["Try the champion"] == "04 Bergen 14 Tartu\n"
    assert (tmp_path / "asked").read_text().splitlines()[1] == f"install kvgate[signing] @ git+file://localhost{ROOT}@{commit}"
    assert json.loads((theirs / "work" / "summary.json").read_text())["champion"] is not None
    assert "PASS" in (tmp_path / "summary.md").read_text()
    # Fetch the champion as in docs/registry.md#fetch-the-champion.
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{theirs}/work/mlflow.db"
    shell("mlflow artifacts download --artifact-uri models:/kvgate-model@champion --dst-path champion")
    (theirs / "champion" / "workloads").mkdir()
    shutil.copy(theirs / "questions.jsonl", theirs / "champion" / "workloads")
    shell("kvgate stage=verify bundle=champion")
    program = 'from pipeline.api import load; print(load("champion").generate("Copy: 04 Bergen 14 Tartu"))'
    assert shell(f"python -c '{program}'").strip()
