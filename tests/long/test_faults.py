"""Injected faults judged by whole evaluations on few requests, and the stress test on sound caches.

`python -m benchmarks.stress_table` runs the stress test with all policies, engines and seeds.
"""

from collections.abc import Callable
from itertools import count, cycle
from typing import Any

import pytest
from faults.hooks import Plant, sound
from faults.library import BY_NAME
from helpers.engines.conformance import POLICIES, Conformity, conformance_config
from helpers.engines.random_llama import static_scales
from helpers.verdicts.evaluations import evaluate, measure_baseline
from helpers.verdicts.reports import GATES

from stages.core.records import no_progress
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy
from stages.verdict.gates.decide import decide
from stages.verdict.report import StressResult, load_rows
from stages.workloads.config import StressTestConfig

FEW = conformance_config(
    samples={"prose": 2, "retrieval": 3, "copy": 3},
    noise_samples=2,
    max_scored_tokens=32,
    stress_test=StressTestConfig(max_tokens=128, decode_steps=8, offset_steps=1, max_batch=17, requests=1, seed=0),
)
"""Workloads that are too small for a PASS, but large enough to detect faults that affect every request."""

Judge = Callable[[Plant], set[str]]
"""Returns the gates that fail an engine with a fault."""


@pytest.fixture(scope="module")
def judge(bench: Conformity, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder, numbers, policy = tmp_path_factory.mktemp("faults"), count(), POLICIES["int8"]
    samples, plain = load_samples(FEW), bench.engine(FP16_POLICY)
    options: dict[str, Any] = {"tokenizer": BundleTokenizer(bench.checkpoint), "config": FEW}
    fp16, int8 = (lambda: bench.reference(FP16_POLICY, plain)), (lambda: bench.reference(policy, plain))
    measure_baseline(lambda: plain, samples, folder / "baseline", open_reference=fp16, **options)

    def judged(fault: Plant) -> set[str]:
        engine, out = bench.engine(policy, fault=fault), folder / str(next(numbers))
        report = evaluate(lambda: engine, samples, folder / "baseline", out, open_reference=int8, **options)
        return {check.gate for check in decide(report, load_rows(out), GATES).checks if check.status == "FAIL"}

    return judged


def test_no_gate_fails_a_sound_engine(judge: Judge) -> None:
    assert judge(sound) == set()


DETECTED = {
    "key_scale_head_x1_25": ("conformance", False),
    "generate_other_callers": ("free_answers", False),
    "control_without_effect": ("must_fail_control", True),
    "rows_above_16": ("stress_test", True),
    "pool_twice_as_large": ("allocation", True),
}
"""Fault -> the gate that must detect it, and whether the fault passes without this gate."""


@pytest.mark.parametrize("name", DETECTED)
def test_a_fault_is_detected_by_its_gate(name: str, judge: Judge) -> None:
    (gate, alone), failed = DETECTED[name], judge(BY_NAME[name].plant)
    assert failed == {gate} if alone else gate in failed, failed


CONFIG = StressTestConfig(max_tokens=448, decode_steps=24, offset_steps=4, max_batch=10, requests=16, seed=0)


def stressed(bench: Conformity, policy: KVPolicy, kind: str) -> StressResult:
    """Run the stress test on the tiny model: with native or graph attention, or on the reference engine itself."""
    plain = bench.engine(FP16_POLICY)
    engine: Any = TorchEngine.from_model(bench.model, policy, static_scales(policy, plain.shape))
    if kind != "reference":
        engine = bench.engine(policy, kind)
    return run_stress_test(engine, bench.reference(policy, plain), CONFIG, 8, 400, no_progress)


@pytest.mark.parametrize(
    ("name", "kind"), list(zip(sorted(POLICIES)[::4], cycle(["native", "graph", "reference"]), strict=False))
)
def test_a_sound_cache_passes_the_stress_test(name: str, kind: str, bench: Conformity) -> None:
    assert stressed(bench, POLICIES[name], kind).failures == []


def test_heavy_hitters_pass_though_their_cache_is_not_shown(bench: Conformity) -> None:
    eviction = Eviction(window_tokens=64, heavy_tokens=64)
    policy = POLICIES["int4_asym"].model_copy(update={"name": "int4_asym_h2o", "eviction": eviction})
    assert stressed(bench, policy, "reference").failures == []
