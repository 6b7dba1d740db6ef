"""`python -m pipeline backend=llamacpp` on llama.cpp, from a checkpoint and from a GGUF to a verdict."""

import json
from pathlib import Path

import pytest
from gate_reports import lines

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.report import EvaluationReport, load_report

FEW = [
    "workloads.max_scored_tokens=16",
    "workloads.batch_size=2",
    "workloads.noise_samples=1",
    "workloads.canary_samples=1",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 2, requests: 1}",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
    "calibration.samples=2",
    "tracking.enabled=false",
    "backend.n_ctx=2048",
    "backend.n_seq_max=4",
    "backend.threads=1",
]


def judge(work: Path, python: str, *given: str) -> EvaluationReport:
    """Return the report of an evaluation with too few questions for a PASS."""
    asked = [f"workdir={work}", "backend=llamacpp", f"backend.python={python}", "stage=evaluate", *FEW, *given]
    (job,) = plan(asked, multirun=False).jobs
    check_inputs(job)
    with pytest.raises(GateRefusal, match="is not decided: INCONCLUSIVE"):
        run(job, "sweep")
    (candidate,) = json.loads((work / "summary.json").read_text())["candidates"]
    return load_report(Path(candidate["report"]["path"]).parent)


def check(report: EvaluationReport, kv: str) -> None:
    for line, policy in zip(lines("conformance", report), ("fp16", kv), strict=True):
        assert line.status == "PASS", line.reason
        assert f"computes {policy} as the oracle does" in line.reason
    assert [line.status for line in lines("canary", report)] == ["PASS"]
    assert report.probes is not None
    for free in (report.probes.free_candidate, report.probes.free_baseline):
        assert free.contradictions == []
    assert report.system.kib_per_token_allocated == report.system.kib_per_token


def test_the_tiny_models_cache_is_what_its_policy_says(tmp_path: Path, llamacpp_python: str) -> None:
    samples = "workloads.samples={prose: 2, retrieval: 1, copy: 1, tool_call: 1, multi_turn: 0}"
    report = judge(tmp_path / "work", llamacpp_python, "kv=llamacpp_q8k_q4v", samples, "calibration.max_length=64")
    check(report, "llamacpp_q8k_q4v")


def test_a_ggufs_cache_is_what_its_policy_says(tmp_path: Path, llamacpp_python: str) -> None:
    samples = "workloads.samples={documentation: 1, lookup: 1, extraction: 0, quotation: 0, recall: 0}"
    few = ["model=smollm2", "calibration=chat", "workloads=chat", samples]
    check(judge(tmp_path / "work", llamacpp_python, "kv=llamacpp_q8k_q4v", *few), "llamacpp_q8k_q4v")
