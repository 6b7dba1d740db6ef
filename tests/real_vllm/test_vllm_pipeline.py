"""`python -m pipeline backend=vllm` on vLLM's CPU build, from a checkpoint, also with quantized weights, to a verdict."""

from pathlib import Path

import pytest
import torch
from helpers.checkpoints.quantized import quantize_checkpoint
from helpers.commands.jobs import SHORT, configured, judge
from helpers.engines.interpreters import KEY_SCALE, make_bundle, open_engine
from helpers.engines.real_libraries import FIRST, KNOWN_LAYOUT, mean_kl, two_stories
from helpers.verdicts.reports import lines
from safetensors import safe_open

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm
from stages.engines.interpreter.backend import CHECKPOINT
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import round_inputs
from stages.evaluate.measure import audit_scales
from stages.policies.policy import Side
from stages.quantize.materialize import write_plain
from stages.verdict.report import load_report

FEW = (*SHORT, "backend=vllm", "kv=fp8", "backend.max_model_len=2048", "backend.kv_cache_gib=0.5")
FAILS = "fp8 does not compute its policy: FAIL"


@KNOWN_LAYOUT
def test_fp8_fails_for_its_computation_and_not_its_answers(tmp_path: Path, vllm_python: str) -> None:
    samples = "workloads.samples={prose: 1, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}"
    few = (*FEW, samples, "calibration.max_length=64", "backend.threads=1")
    directory, summary = judge(configured(tmp_path / "work", f"backend.python={vllm_python}", *few), FAILS)
    report = load_report(directory)
    baseline, candidate = lines("conformance", report)
    assert baseline.status == "PASS", baseline.reason
    assert "computes fp16 as the reference engine does" in baseline.reason
    assert candidate.status == "FAIL", candidate.reason
    assert "does not compute fp8" in candidate.reason
    assert "first stored wrong at position 0 (page offset 0)" in candidate.reason
    assert report.scale_changes == []
    assert report.baseline_tests.noise is not None
    assert report.baseline_tests.noise.kl_max is not None
    assert report.baseline_tests.noise.kl_max < 0.02, "the noise of bfloat16 between a request alone and in a batch"
    assert report.tests.free_answers is not None
    assert report.tests.free_answers.contradictions == []
    assert report.tests.system.kib_per_token_allocated == report.tests.system.kib_per_token
    assert report.tests.system.time_to_first_token_ms > 0
    assert (summary["backend"], summary["verdict"]) == ("vllm", "FAIL")
    assert report.overall.fidelity.kl_mean is not None
    assert report.overall.fidelity.kl_mean < 0.01
    assert lines("must_fail_control", report)[0].status == "PASS"


@pytest.mark.parametrize(
    ("form", "kv", "stored_as"),
    [
        ("W8A8 INT8", "fp8", {"weight": "I8"}),
        ("AWQ", "fp8_e5m2", {"qweight": "I32"}),
        ("W4A16", "fp8", {"weight_packed": "I32"}),
    ],
)
def test_quantized_weights_are_used_as_stored(
    form: str, kv: str, stored_as: dict[str, str], tiny_checkpoint: Path, vllm_python: str, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)
    bundle = make_bundle("vllm", tmp_path / "given", tmp_path / "bundle", kv, vllm_python)
    story = two_stories(tiny_checkpoint)[0]
    engine = open_engine(bundle, vllm_python)
    rows = engine.forced(story, FIRST)
    assert audit_scales(engine, ()) == []
    assert engine.delivery()[0].used[Side.KEY] == pytest.approx((KEY_SCALE if kv == "fp8" else 1.0,))
    engine.close()
    model = load_causal_lm(tmp_path / "plain", dtype=torch.float32)
    round_inputs(model)
    expected = TorchEngine.from_model(model, engine.policy, engine._scales).forced(story, FIRST)
    assert mean_kl(expected, rows) < 0.01
    with safe_open(bundle / CHECKPOINT / "model.safetensors", "pt") as stored:
        assert {part: stored.get_slice(f"model.layers.0.mlp.up_proj.{part}").get_dtype() for part in stored_as} == stored_as
