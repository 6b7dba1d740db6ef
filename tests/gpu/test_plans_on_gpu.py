"""Plans of backend=tensorrt on a machine with TensorRT and a GPU: properties that no other test can check.

python -m pytest -m gpu tests/gpu/test_plans_on_gpu.py
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job import Run
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement
from stages.engines.bundle import open_bundle
from stages.engines.interface import Engine
from stages.engines.reference.engine import load_engine as load_reference
from stages.engines.tensorrt.bundle import PLANS, PlanRecord
from stages.engines.tensorrt.engine import PlanEngine, load_engine
from stages.engines.tensorrt.library import Library, load
from stages.engines.torch.config import TorchConfig
from stages.evaluate.distances.distance import kl_of_logits
from stages.policies.policy import KVPolicy

pytestmark = pytest.mark.gpu

MAX_KL = 0.01
"""Largest KL in nats per token between the reference engine (float32) and the plans (float16), which round activations."""
CORRUPTION_GAIN = 10.0
"""Minimum ratio of the KL with a corrupted key scale to the sound KL; below it, the logits do not depend on the cache."""
POLICY = ("kv=fp8k_int4v", "kv.sink_tokens=4", "kv.recent_tokens=64")
"""A policy with exact tokens, which a step overwrites after its attention has read them."""
PLUGIN_FREE_PROGRAM = """
import sys
import tensorrt as trt
log = trt.Logger(trt.Logger.ERROR)
engine = trt.Runtime(log).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
assert engine is not None, "the plan does not load"
assert not [name for name in sys.modules if name.startswith(("plugins", "triton"))]
"""


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load("tensorrt")
    except MissingRequirement as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def chain(library: Library, tmp_path_factory: pytest.TempPathFactory) -> EngineSteps:  # noqa: ARG001  (without it nothing is built)
    overrides = ["backend=tensorrt", "stage=build", "tracking=none", f"workdir={tmp_path_factory.mktemp('work')}", *POLICY]
    config = plan(overrides, multirun=False).jobs[0]
    check_inputs(config)
    return Run(config).engine_steps


@pytest.fixture(scope="module")
def policy(chain: EngineSteps) -> KVPolicy:
    return chain.config.kv


@pytest.fixture(scope="module")
def bundle(chain: EngineSteps, policy: KVPolicy) -> Path:
    return chain.bundle(policy).path


@pytest.fixture
def engine(bundle: Path) -> Callable[..., PlanEngine]:
    return lambda: load_engine(bundle, library="tensorrt")


def tokens(engine: Engine, size: int) -> list[int]:
    """Return random token ids. Every call returns the same."""
    return np.random.default_rng(size).integers(0, engine.vocab_size, size).tolist()  # type: ignore[no-any-return]


def test_a_plan_has_its_kernels_and_loads_without_the_plugin(bundle: Path) -> None:
    record, *_ = open_bundle(bundle, PlanRecord, "tensorrt")
    assert not record.native, "the policy's layers kept their function bodies"
    command = [sys.executable, "-c", PLUGIN_FREE_PROGRAM, str(bundle / PLANS["decode"])]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_the_pool_of_fp8_keys_is_bound_as_fp8_in_linear_layout(library: Library, bundle: Path) -> None:
    plan_of_decode = library.trt.Runtime(library.log).deserialize_cuda_engine((bundle / PLANS["decode"]).read_bytes())
    assert plan_of_decode is not None, library.take_errors()
    assert plan_of_decode.get_tensor_dtype("key_pool.0").name == "FP8"
    assert "linear" in plan_of_decode.get_tensor_format_desc("key_pool.0").lower()


def test_plans_store_tokens_of_prompts_and_of_all_kinds_of_steps(engine: Callable[..., PlanEngine]) -> None:
    plan_engine = engine()
    (sequence,), _ = plan_engine.prefill([tokens(plan_engine, 70)])
    for token in range(3):
        plan_engine.decode([sequence], [token])
    for layer, copies in enumerate(plan_engine.stored(sequence)):
        for side, copy in copies.items():
            lost = np.flatnonzero(~copy.codes.any((0, 2)))
            assert not lost.size, f"{side}s of layer {layer}: tokens {lost[:5]} are not in the pool"


def test_forced_decode_equals_the_reference_unless_corrupted(
    engine: Callable[..., PlanEngine], chain: EngineSteps, policy: KVPolicy
) -> None:
    built = chain.bundle(policy, TorchConfig(name="torch", device="cpu", threads=1)).path

    def forced_kl(*, broken: bool) -> float:
        """Return the mean KL from the reference engine in nats per token; `broken` corrupts the key scale after prefill."""
        plan_engine, reference = engine(), load_reference(built, threads=1)
        text, divergences = tokens(plan_engine, 230), []
        (mine, _), (exact, _) = plan_engine.prefill([text[:200]]), reference.prefill([text[:200]])
        if broken:
            plan_engine.corrupt_key_scale(0.1)
        for token in text[200:]:
            expected, actual = (x.decode(at, [token]) for x, at in ((reference, exact), (plan_engine, mine)))
            divergences.append(float(kl_of_logits(expected, actual)[0]))
        return float(np.mean(divergences))

    kl = forced_kl(broken=False)
    assert kl <= MAX_KL
    assert forced_kl(broken=True) >= CORRUPTION_GAIN * kl


def test_captured_steps_equal_launched_steps_bit_for_bit(engine: Callable[..., PlanEngine]) -> None:
    logits = []
    for captured in (False, True):
        plan_engine = engine()
        plan_engine._sessions["decode"].captured = captured
        handles, _ = plan_engine.prefill([tokens(plan_engine, size) for size in (60, 7, 129)])
        logits.append([plan_engine.decode(handles, [step, step + 1, step + 2]) for step in range(8)])
    assert any(step.replay is not None for step in plan_engine._sessions["decode"]._steps.values())
    assert np.isfinite(logits).all()
    assert np.array_equal(logits[0], logits[1])
