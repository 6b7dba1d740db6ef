"""Complete evaluations on few samples, from the command line to the report on disk. No gate passes on so little evidence."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.commands.jobs import run_job
from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from pipeline.config.config import Config
from stages.core.errors import GateRefusal

THREE = "workloads.samples={prose: 1, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}"
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


def job_of(work: Path, *given: str) -> Config:
    (job,) = plan([f"workdir={work}", *SHORT, *given], multirun=False).jobs
    return job


def judge(job: Config, refused: str) -> tuple[Path, dict[str, Any]]:
    """Evaluate; return the report's directory and the candidate from summary.json."""
    check_inputs(job)
    with pytest.raises(GateRefusal, match=refused):
        run_job(job)
    candidate, *_ = json.loads((job.work / "summary.json").read_text())["candidates"]
    return Path(candidate["report"]["path"]).parent, candidate
