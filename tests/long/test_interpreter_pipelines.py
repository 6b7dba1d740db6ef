"""`python -m pipeline` from a checkpoint to a report, with kvgate's worker on a fake TensorRT-LLM.

The fake gives no right answers, so no verdict is PASS. The test shows that the pipeline runs and that the evaluation reads the
cache. Engines of other libraries: tests/contract/test_interpreters.py, tests/real_vllm, tests/real_llamacpp.
"""

from pathlib import Path

import pytest
from helpers.commands.jobs import SHORT, configured, run_job
from helpers.engines.interpreters import make_interpreter
from helpers.verdicts.reports import lines

from pipeline.registry import summary
from stages.core.errors import GateRefusal
from stages.verdict.report import load_report

FEW = (
    *SHORT,
    "workloads.samples={prose: 1, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}",
    "gates.min_baseline_probability=0",
    "workloads.rounds=[1.0]",
    "workloads.conformance_samples=0",  # the fake does not compute the model
    "calibration.max_length=64",
)


def test_allowed_scale_changes_let_an_engine_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ModelOpt's export cannot store an FP8 scale below 1."""
    overrides = (*FEW, "kv=fp8", "backend=trtllm", f"backend.python={make_interpreter(tmp_path / 'bin')}")
    refused = r"8 defaulted \(layer 0 keys: .* became the default, 1\.0\); .*scale_changes=\[defaulted\]"
    with pytest.raises(GateRefusal, match=refused):
        run_job(configured(tmp_path / "work", *overrides))
    job = configured(tmp_path / "work", *overrides, "gates.allow_scale_changes=[defaulted]")
    run_job(job)
    (candidate,) = summary.load(job.work).candidates
    assert candidate.verdict == "INCONCLUSIVE"
    report = load_report(candidate.report.path.parent)
    assert report.overall.fidelity.kl_mean is not None
    assert 1e-6 < report.overall.fidelity.kl_mean < 0.1, "the fake's FP8 cache is close to its FP16 cache"
    assert report.overall.fidelity.non_finite_steps == 0
    noise = report.baseline_tests.noise
    assert noise is not None
    assert noise.kl_max == pytest.approx(0.0, abs=1e-6), "stepwise and one-pass decode give the same logits"
    assert lines("must_fail_control", report)[0].status == "PASS"
    assert "a promotion will refuse the engine, since the samples have at most" in " ".join(capsys.readouterr().out.split())
