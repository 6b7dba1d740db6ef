"""`python -m pipeline backend=trtllm` from a checkpoint to a report, with ModelOpt's real exports and the fake TensorRT-LLM.

The toy answers nothing right, so that no verdict is PASS; what is proven is the way through, and that the evaluation reads
the cache.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import make_interpreter
from gate_reports import lines
from safetensors.torch import load_file

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.report import load_report

FACTS = Path(__file__).resolve().parents[1] / "contract" / "facts"
FEW = [
    "workloads.samples={prose: 2, retrieval: 1, copy: 1, tool_call: 0, multi_turn: 0}",
    "workloads.max_scored_tokens=24",
    "workloads.noise_samples=1",
    "workloads.canary_samples=1",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 4, max_batch: 2, requests: 4}",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
    "calibration.samples=2",
    "calibration.max_length=64",
    "tracking.enabled=false",
]


def arguments(work: Path, *given: str) -> list[str]:
    return [f"workdir={work}", "backend=trtllm", *FEW, *given]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A work directory after an evaluation, and its candidate."""
    work = tmp_path_factory.mktemp("trtllm") / "work"
    python = make_interpreter(work.parent / "bin")
    # as the command line does it, in this process: torch and ModelOpt are loaded here already
    given = arguments(work, "kv=fp8", f"backend.python={python}", "stage=evaluate", "gates.min_baseline_probability=0")
    (strict,) = plan(given, multirun=False).jobs
    refused = r"8 defaulted \(layer 0 keys: .* became the default, 1\.0\); .*scale_changes=\[defaulted\]"
    with pytest.raises(GateRefusal, match=refused):
        run(strict, "sweep")  # ModelOpt's export has no FP8 scale below 1
    (job,) = plan([*given, "gates.allow_scale_changes=[defaulted]"], multirun=False).jobs
    check_inputs(job)
    with pytest.raises(GateRefusal, match="fp8 is not decided: INCONCLUSIVE"):
        run(job, "sweep")
    (candidate,) = json.loads((work / "summary.json").read_text())["candidates"]
    return work, candidate


def test_an_engine_of_tensorrt_llm_is_judged_like_any_other(judged: tuple[Path, dict[str, Any]]) -> None:
    _, candidate = judged
    assert (candidate["backend"], candidate["verdict"]) == ("trtllm", "INCONCLUSIVE")
    report = load_report(Path(candidate["report"]["path"]).parent)
    assert report.samples == 4
    assert report.overall.fidelity.kl_mean is not None
    assert 1e-6 < report.overall.fidelity.kl_mean < 0.1, "an FP8 cache of the toy is close to its FP16 one"
    assert report.overall.fidelity.non_finite_steps == 0
    assert report.noise.fidelity is not None
    assert report.noise.fidelity.kl_max == pytest.approx(0.0, abs=1e-6), "stepping and one pass are the same logits"
    assert report.system.kib_per_token == report.system.kib_per_token_allocated == 1.0
    assert lines("canary", report)[0].status == "PASS"
    assert {change.kind for change in report.scale_changes or []} == {"defaulted"}


def test_modelopts_exports_hold_the_recorded_tensors_and_keys(judged: tuple[Path, dict[str, Any]]) -> None:
    facts = json.loads((FACTS / "engine-1.2.1.json").read_text(encoding="utf-8"))
    scales = json.loads((FACTS / "pytorch-1.3.json").read_text(encoding="utf-8"))["checkpoint"]["scales"]
    for exports in (judged[0] / "artifacts" / "exports").iterdir():
        if not exports.is_dir():
            continue
        names = {
            re.sub(r"layers\.\d+\.", "layers.{layer}.", name)
            for name in load_file(exports / "tensorrt_llm" / "rank0.safetensors")
        }
        assert names <= set(facts["tensors"]["names"])
        config = json.loads((exports / "tensorrt_llm" / "config.json").read_text())
        assert set(config["quantization"]) <= set(facts["quantization"]["keys"])
        served = {
            re.sub(r"layers\.\d+\.", "layers.{layer}.", name)
            for name in load_file(exports / "unified_hf" / "model.safetensors")
        }
        quantizes = config["quantization"]["kv_cache_quant_algo"] is not None
        assert {name for name in served if name.endswith("_scale")} == (set(scales) if quantizes else set())
