"""`python -m pipeline` from a checkpoint to a report over our workers on a fake TensorRT-LLM and a fake SGLang.

The toys answer nothing right, so that no verdict is PASS; what is proven is the way through, and that the evaluation reads
the cache.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_interpreter import make_interpreter, make_sglang_interpreter
from gate_reports import lines

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.report import EvaluationReport, load_report

FEW = [
    "stage=evaluate", "tracking=none", "gates.min_baseline_probability=0", "workloads.max_scored_tokens=16",
    "workloads.samples={prose: 1, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}", "workloads.rounds=[1.0]",
    "workloads.batch_size=2",
    "workloads.noise_samples=1", "workloads.canary_samples=1", "calibration.samples=2", "calibration.max_length=64",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 4, max_batch: 2, requests: 4}",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
]  # fmt: skip


def judged(work: Path, kv: str, *given: str) -> EvaluationReport:
    (job,) = plan([f"workdir={work}", f"kv={kv}", *FEW, *given], multirun=False).jobs
    check_inputs(job)
    with pytest.raises(GateRefusal, match=f"{kv} is not decided: INCONCLUSIVE"):
        run(job, "sweep")
    (candidate,) = json.loads((work / "summary.json").read_text())["candidates"]
    return load_report(Path(candidate["report"]["path"]).parent)


@pytest.mark.parametrize(
    ("backend", "make", "kv", "options"),
    [
        ("trtllm", make_interpreter, "fp8", ["gates.allow_scale_changes=[defaulted]"]),
        ("sglang", make_sglang_interpreter, "fp8_uncalibrated", ["backend.context_length=2048"]),
    ],
)
def test_an_engine_in_an_interpreter_of_its_own_is_judged_like_any_other(
    backend: str, make: Callable[[Path], str], kv: str, options: list[str], tmp_path: Path
) -> None:
    report = judged(tmp_path / "work", kv, f"backend={backend}", f"backend.python={make(tmp_path / 'bin')}", *options)
    assert report.overall.fidelity.kl_mean is not None
    assert 1e-6 < report.overall.fidelity.kl_mean < 0.1, "an FP8 cache of the toy is close to its FP16 one"
    assert report.overall.fidelity.non_finite_steps == 0
    assert report.noise.fidelity is not None
    assert report.noise.fidelity.kl_max == pytest.approx(0.0, abs=1e-6), "stepping and one pass are the same logits"
    assert lines("canary", report)[0].status == "PASS"


def test_scales_that_tensorrt_llm_does_not_carry_are_refused_by_the_key_that_allows_them(tmp_path: Path) -> None:
    """ModelOpt's export has no FP8 scale below 1."""
    python = make_interpreter(tmp_path / "bin")
    given = [f"workdir={tmp_path / 'work'}", "backend=trtllm", f"backend.python={python}", "kv=fp8", *FEW]
    (strict,) = plan(given, multirun=False).jobs
    refused = r"8 defaulted \(layer 0 keys: .* became the default, 1\.0\); .*scale_changes=\[defaulted\]"
    with pytest.raises(GateRefusal, match=refused):
        run(strict, "sweep")
