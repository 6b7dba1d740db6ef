"""The whole pipeline over our worker on a fake SGLang."""

import json
from pathlib import Path

import pytest
from fake_interpreter import make_sglang_interpreter
from gate_reports import lines

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.report import load_report


def test_an_engine_of_sglang_is_judged_like_any_other(tmp_path: Path) -> None:
    """The toy answers nothing right, so that no verdict is PASS. Proven are the way through and the must-fail control."""
    python = make_sglang_interpreter(tmp_path / "bin")
    given = [
        f"workdir={tmp_path / 'work'}", "backend=sglang", f"backend.python={python}", "backend.context_length=2048",
        "kv=fp8_uncalibrated", "stage=evaluate", "tracking=none", "calibration.samples=2", "calibration.max_length=64",
        "workloads.samples={prose: 1, retrieval: 0, copy: 1, tool_call: 0, multi_turn: 0}", "workloads.max_scored_tokens=16",
        "workloads.noise_samples=1", "workloads.canary_samples=1", "workloads.rounds=[1.0]", "gates.min_baseline_probability=0",
        "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 4, max_batch: 2, requests: 4}",
        "workloads.load={batch: 2, context_tokens: 64, new_tokens: 4, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
    ]  # fmt: skip
    (job,) = plan(given, multirun=False).jobs
    check_inputs(job)
    with pytest.raises(GateRefusal, match="fp8_uncalibrated is not decided: INCONCLUSIVE"):
        run(job, "sweep")
    (candidate,) = json.loads((job.work / "summary.json").read_text())["candidates"]
    report = load_report(Path(candidate["report"]["path"]).parent)
    assert lines("canary", report)[0].status == "PASS"
    assert report.overall.fidelity.kl_mean is not None
    assert 1e-6 < report.overall.fidelity.kl_mean < 0.1
    assert report.noise.fidelity is not None
    assert report.noise.fidelity.kl_max == pytest.approx(0.0, abs=1e-6)
