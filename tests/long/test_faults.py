"""Injected faults judged by whole evaluations on few requests, and the stress test on sound caches.

`python -m benchmarks.stress_table` runs the stress test with all policies, engines and seeds.
"""

from itertools import cycle
from typing import Any

import pytest
from faults.library import BY_NAME
from faults.runner import FaultRunner
from helpers.engines.conformance import POLICIES, Conformity
from helpers.engines.random_llama import static_scales

from stages.core.records import no_progress
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy
from stages.verdict.report import StressResult
from stages.workloads.config import StressTestConfig

FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1, seed: 0}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4}",
)
"""Workloads that are too small for a PASS, but large enough to detect faults that affect every request."""

EXPECTED_GATES = {"key_scale_head_x1_25": "conformance", "generate_other_callers": "free_answers"}
"""Fault -> gate that must detect it; judged in addition to ALONE."""

ALONE = {"must_fail_control": "control_without_effect", "stress_test": "rows_above_16", "allocation": "pool_twice_as_large"}
"""Gate -> a fault that passes if this gate is disabled."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> FaultRunner:
    return FaultRunner(tmp_path_factory.mktemp("faults"), FEW)


def test_no_gate_refuses_a_sound_engine(runner: FaultRunner) -> None:
    assert runner.judge().failed == set()


@pytest.mark.parametrize(("name", "gate"), EXPECTED_GATES.items())
def test_a_planted_fault_is_refused_by_its_gate(name: str, gate: str, runner: FaultRunner) -> None:
    assert gate in runner.judge(BY_NAME[name].plant).failed


@pytest.mark.parametrize(("gate", "name"), ALONE.items())
def test_a_fault_passes_without_the_only_gate_that_detects_it(gate: str, name: str, runner: FaultRunner) -> None:
    judgement = runner.judge(BY_NAME[name].plant)
    assert judgement.verdict.status == "FAIL"
    assert runner.without(gate, judgement).status != "FAIL"


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
