"""The stress test on sound caches: every fourth policy on one of the CPU engines. None may fail.

`python -m benchmarks.stress_table` has all policies, engines and seeds.
"""

from itertools import cycle
from typing import Any

import pytest
from helpers.engines.conformance import POLICIES, Conformity
from helpers.engines.random_llama import static_scales

from stages.core.records import no_progress
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy
from stages.verdict.report import StressResult
from stages.workloads.config import StressTestConfig

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
