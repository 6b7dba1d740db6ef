"""Evaluations on few samples in this process. No gate passes on so little evidence."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain.command import run
from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import Plan, plan
from pipeline.config.config import Config
from pipeline.registry.summary import new_sweep
from stages.core.errors import GateRefusal

SHORT = (
    "stage=evaluate",
    "workloads.max_scored_tokens=16",
    "workloads.batch_size=2",
    "workloads.noise_samples=1",
    "workloads.full_pool=0",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 2, requests: 1}",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8}",
    "calibration.samples=2",
)


def configured(workdir: Path, *overrides: str) -> Config:
    """Return the configuration of a command without tracking."""
    return plan([f"workdir={workdir}", "tracking=none", *overrides], multirun=False).jobs[0]


def run_job(config: Config, sweep: str = "") -> None:
    """Run the only job of a command; errors are raised. `sweep`: its id; empty for a new one."""
    run(Plan([config], ([],)), sweep or new_sweep())


def judge(job: Config, refused: str) -> tuple[Path, dict[str, Any]]:
    """Evaluate, and assert a GateRefusal that matches `refused`. Return the report's directory and the candidate's entry."""
    check_inputs(job)
    with pytest.raises(GateRefusal, match=refused):
        run_job(job)
    candidate, *_ = json.loads((job.work / "summary.json").read_text())["candidates"]
    return Path(candidate["report"]["path"]).parent, candidate
