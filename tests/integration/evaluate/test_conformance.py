"""Conformance of ONNX engines: sound engines agree with the reference engine up to rounding, and faults are located."""

from itertools import cycle
from pathlib import Path

import pytest
from faults.hooks import Plant, times, write, zero
from faults.library import BY_NAME as FAULTS
from helpers.engines.conformance import POLICIES, Conformity, conformance_config
from helpers.engines.random_llama import static_scales
from helpers.stride import STRIDE
from helpers.verdicts.evaluations import evaluate, measure_baseline
from helpers.verdicts.reports import lines, report

from stages.engines.onnx.engine import OnnxEngine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance import stress_test
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.policies.policy import FP16_POLICY, KVPolicy
from stages.verdict.conformance import Conformance, Deviation, EngineConformance
from stages.verdict.verdict import Check
from stages.workloads.config import StressTestConfig

SOUND = sorted(POLICIES)[:: 1 if STRIDE == 1 else 2 * STRIDE]
PAGE_END_UNWRITTEN = FAULTS["shared_page_end_unwritten"].plant
BRIEF = StressTestConfig(max_tokens=128, decode_steps=8, offset_steps=1, max_batch=2, requests=1)


@pytest.fixture(scope="module")
def baseline(bench: Conformity) -> EngineConformance:
    return bench.compared(FP16_POLICY, bench.engine(FP16_POLICY))


def checks_of(baseline: EngineConformance, candidate: EngineConformance) -> list[Check]:
    record = Conformance(rounding=2.0**-22, baseline=baseline, candidate=candidate)
    return lines("conformance", report([], conformance=record))


def statuses(baseline: EngineConformance, candidate: EngineConformance) -> dict[str, str]:
    return {check.where: check.status for check in checks_of(baseline, candidate)}


def compare_faulty(
    bench: Conformity, baseline: EngineConformance, policy: KVPolicy, engine: OnnxEngine | TorchEngine
) -> tuple[EngineConformance, Deviation]:
    """Return the conformance of a faulty engine, which must fail, and its first deviation."""
    result = bench.compared(policy, engine)
    assert statuses(baseline, result)["candidate"] == "FAIL"
    assert result.deviation is not None
    return result, result.deviation


@pytest.mark.every
@pytest.mark.parametrize(("name", "attention"), list(zip(SOUND, cycle(["graph", "native"]), strict=False)))
def test_a_sound_engine_is_within_rounding_of_its_reference_engine(
    name: str, attention: str, bench: Conformity, baseline: EngineConformance
) -> None:
    result = bench.compared(POLICIES[name], bench.engine(POLICIES[name], attention))
    assert max(request.engine.kl_max or 0.0 for request in result.requests) < 1e-7, "measured: at most 2e-9"
    assert len(result.requests) == len(bench.encoded)
    assert result.deviation is None
    assert statuses(baseline, result) == {"baseline": "PASS", "candidate": "PASS"}
    assert result.ranked[0] < 1


def never_evicts(engine: OnnxEngine) -> None:
    engine.pool.policy = engine.policy.model_copy(update={"eviction": None})


LOCATED: dict[str, tuple[str, Plant, dict[str, object]]] = {
    "a wrong key scale of one head": (
        "int8", write("key_scale", times(2), layers=[2], heads=[1]),
        {"operation": "stored", "layer": 2, "side": "key", "head": 1, "position": 0},
    ),
    "truncated codes": ("int8", FAULTS["truncated"].plant, {"operation": "stored", "side": "key"}),
    "truncated FP8 codes": ("fp8", FAULTS["fp8_truncated"].plant, {"operation": "stored", "side": "key"}),
    "a rounded scale": ("fp8", FAULTS["values_x1_02_layer"].plant, {"operation": "stored", "layer": 3, "side": "value"}),
    "swapped groups": ("int4_g32", FAULTS["groups_swapped"].plant, {"operation": "stored", "side": "value"}),
    "the first 40 steps": ("fp8", FAULTS["first_40_steps"].plant, {"operation": "read"}),
    "a ring that never wraps": ("int4_sinks", FAULTS["ring_never_wraps"].plant, {"operation": "read"}),
    "a stale page in every tenth step": (
        "int8", FAULTS["stale_page_one_step_in_ten"].plant, {"operation": "read", "side": None},
    ),
    "nothing is evicted": ("int8_evicting", never_evicts, {}),
    "a page is evicted too early": ("int4_sinks_evicting", FAULTS["evicted_page_early"].plant, {}),
}  # fmt: skip
"""Fault -> policy, the planted fault, and fields of the first deviation."""


@pytest.mark.parametrize(("name", "fault", "expected"), LOCATED.values(), ids=LOCATED)
def test_a_fault_fails_and_is_located(
    name: str, fault: Plant, expected: dict[str, object], bench: Conformity, baseline: EngineConformance
) -> None:
    result, deviation = compare_faulty(bench, baseline, POLICIES[name], bench.engine(POLICIES[name], fault=fault))
    assert deviation.model_dump().items() >= expected.items()
    assert min(result.ranked) > 1 or deviation.operation != "stored", "a fault in stored codes shows in every request"
    assert deviation.operation == "stored" or None not in (deviation.layer, deviation.batch_row, deviation.batch_size)


def test_flushed_subnormals_are_within_rounding(bench: Conformity, baseline: EngineConformance) -> None:
    """docs/limits.md lists this fault as undetected."""
    policy = POLICIES["fp8"]
    result = bench.compared(policy, bench.engine(policy, fault=FAULTS["subnormals_flushed"].plant))
    assert statuses(baseline, result)["candidate"] == "PASS"


def test_a_scored_pass_that_does_not_quantize_is_located(bench: Conformity, baseline: EngineConformance) -> None:
    """The reference backend computes scored tokens in one pass."""
    policy = POLICIES["int4_tensor"]
    engine = TorchEngine.from_model(bench.model, policy, static_scales(policy, bench.engine(FP16_POLICY).shape))
    FAULTS["torch_scored_unquantized"].plant(engine)
    _, deviation = compare_faulty(bench, baseline, policy, engine)
    assert deviation.operation == "computed"


def test_zero_sinks_are_located_at_the_first_decoded_tokens(bench: Conformity, baseline: EngineConformance) -> None:
    policy = POLICIES["int4_sinks"]
    fault = write("key_exact", zero, lambda step: step.positions < policy.sink_tokens)
    _, deviation = compare_faulty(bench, baseline, policy, bench.engine(policy, fault=fault))
    assert deviation.operation == "read"
    (item,) = (item for item in bench.encoded if item.sample.id == deviation.sample)
    assert 0 <= deviation.position - (len(item.prompt) - 1) < 3


def test_a_fault_in_a_page_that_is_evicted_later_is_located(bench: Conformity, baseline: EngineConformance) -> None:
    """Only the prose prompt still has its second page when decoding begins. Longer prompts have evicted it."""
    policy = POLICIES["int8_evicting"]
    in_second_page = write(
        "value", lambda x, _: -x, lambda step: (step.mode == "prefill") & (step.positions // 64 == 1), layers=[1]
    )
    engine = bench.engine(policy, fault=in_second_page)
    result, deviation = compare_faulty(bench, baseline, policy, engine)
    assert (deviation.operation, deviation.side, deviation.layer, deviation.position) == ("stored", "value", 1, 64)
    assert [times > 1 for times in result.ranked].count(True) == 1
    (item,) = (item for item in bench.encoded if item.sample.id == deviation.sample)
    lengths = (len(item.prompt), len(item.prompt) + len(item.reference) - 1)
    before, after = (policy.evicted_pages(length, engine.shape) for length in lengths)
    assert 1 not in before
    assert 1 in after


def test_an_engine_that_stores_float16_and_claims_int4_fails(bench: Conformity, baseline: EngineConformance) -> None:
    policy, engine = POLICIES["int4_tensor"], bench.engine(FP16_POLICY)
    engine.policy = policy
    result = bench.compared(policy, engine)
    check = checks_of(baseline, result)[1]
    assert check.status == "FAIL"
    assert "layer 0 keys take 128 bytes a token and head, int4 takes 32" in check.reason


def test_an_evaluation_of_two_engines_that_share_a_fault_fails(
    bench: Conformity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of baseline and candidate are equal, so only the reference engine can show their common fault."""
    monkeypatch.setattr(stress_test, "SCENARIOS", {})  # the samples suffice to show the fault
    config = conformance_config(conformance_samples=1, noise_samples=0, stress_test=BRIEF)
    samples, tokenizer = load_samples(config), BundleTokenizer(bench.checkpoint)
    stored = tmp_path / "baseline"

    def engine() -> OnnxEngine:
        return bench.engine(FP16_POLICY, fault=PAGE_END_UNWRITTEN)

    def reference() -> ReferenceEngine:
        return bench.reference(FP16_POLICY, bench.engine(FP16_POLICY))

    measure_baseline(engine, samples, stored, tokenizer=tokenizer, config=config, open_reference=reference)
    report = evaluate(engine, samples, stored, tmp_path, tokenizer=tokenizer, config=config, open_reference=reference)
    assert report.overall.fidelity.kl_max == pytest.approx(0.0, abs=1e-6)
    assert report.conformance is not None
    checks, deviation = lines("conformance", report), report.conformance.baseline.deviation
    assert [check.status for check in checks] == ["FAIL", "FAIL"]
    assert "does not compute fp16" in checks[0].reason
    assert deviation is not None
    assert (deviation.operation, deviation.position, deviation.page_offset) == ("stored", 63, 63)
    assert report.conformance.rounding == 2.0**-22
    assert {request.sample.split("-")[0] for request in report.conformance.candidate.requests} == {"prose", "retrieval"}
