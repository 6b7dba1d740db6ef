"""The stress test alone, of sound caches: every policy on every engine of a CPU, with several seeds, and none may fail."""

from pathlib import Path
from typing import Any

import pytest
from amount import STRIDE
from conformance_cases import POLICIES, Conformity
from onnx_fixtures import static_scales

from pipeline.core.records import no_progress
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Probe
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.twins.probe import probe

CONFIG = ProbeConfig(max_tokens=448, decode_steps=24, offset_steps=4, max_batch=10, requests=16)
SEEDS = range(5 if STRIDE == 1 else 1)


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Conformity:
    return Conformity(tiny_checkpoint, tmp_path_factory)


def stressed(bench: Conformity, name: str, kind: str, seed: int) -> Probe:
    """Run the stress test on an engine of the tiny model: attention native or graph, or the reference engine itself."""
    policy = POLICIES[name]
    engine: Any = bench.engine(policy, "native" if kind == "reference" else kind)
    twin = bench.twin(policy, engine)
    if kind == "reference":
        engine = OracleEngine.from_model(bench.model, policy, static_scales(policy, engine.shape))
    return probe(engine, twin, CONFIG.model_copy(update={"seed": seed}), 8, 400, no_progress)


@pytest.mark.parametrize("kind", ["native", "graph", "reference"])
@pytest.mark.parametrize("name", sorted(POLICIES)[::STRIDE])
def test_a_sound_cache_passes_the_stress_test(name: str, kind: str, bench: Conformity) -> None:
    failures = {seed: found for seed in SEEDS if (found := stressed(bench, name, kind, seed).failures)}
    assert failures == {}
