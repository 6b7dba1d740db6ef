"""The reference engine on a real GPU compared with the CPU, and an evaluation with the reference engine on the GPU."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands.tiny_model import judge_on_gpu
from helpers.engines.random_llama import make_reference_bundle
from helpers.kernels.engines import GUARDED, distance
from helpers.policies.shipped import SHIPPED

from benchmarks import benchlib
from stages.core.errors import MissingRequirement
from stages.core.records import StoredCopy
from stages.engines.reference.attention import Fed
from stages.engines.reference.engine import TorchEngine, load_engine
from stages.policies.policy import Eviction, Side

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
INT8 = SHIPPED["int8"]
EVICTING = INT8.model_copy(update={"name": "int8_evicting", "eviction": Eviction(window_tokens=64)})
HEAVY = INT8.model_copy(update={"name": "h2o", "eviction": Eviction(window_tokens=64, heavy_tokens=64)})
NAMES = (
    "fp16", "fp8k_int4v", "fp8k_int4v_aged", "int8", "int4_hadamard", "int4_sinks", "nvfp4", "llamacpp_q4_0",
    "vllm_int4", "vllm_k8v4",
)  # fmt: skip
POLICIES = [*(SHIPPED[name] for name in NAMES), GUARDED, EVICTING, HEAVY]

TYPICAL = 1e-3
"""Allowed distance in the median row, relative to the logits' norm.

On a CPU, layers that are off by 2^-21 cause 1e-6 to 1e-4. Quantization by a policy causes 8e-3 and more.
"""
FLIPPED = 1e-1
"""Allowed distance in the worst row, after a number between two codes got the other code. Measured: 2e-2."""
REPLAYED = 3e-5
"""Allowed distance over equal codes, so that no code can flip. Measured: 1e-6 to 5e-6."""
REPLAYED_EXACT = 5e-4
"""Allowed distance over the same codes if some tokens are kept in float16. Measured: 1e-4."""


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokens: list[list[int]] = benchlib.story_tokens(4, 420).tolist()
    return tokens


def load_pair(bundle: Path) -> tuple[TorchEngine, ...]:
    pair = tuple(load_engine(bundle, threads=4, device=device) for device in (CUDA, torch.device("cpu")))
    for engine in pair:
        engine.prefill_chunk = 128
    return pair


@pytest.fixture(params=POLICIES, ids=lambda policy: policy.name)
def pair(request: pytest.FixtureRequest, tmp_path: Path, tiny_checkpoint: Path) -> tuple[TorchEngine, ...]:
    """A policy's reference engine on the GPU, and on the CPU."""
    bundle = make_reference_bundle(tiny_checkpoint, tmp_path / "bundle", request.param)
    return load_pair(bundle)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    rows = np.linalg.norm((ours - theirs).astype(np.float64), axis=-1) / np.linalg.norm(theirs.astype(np.float64), axis=-1)
    assert (float(np.median(rows)) < TYPICAL, float(rows.max()) < FLIPPED) == (True, True), (np.median(rows), rows.max())


def test_replays_and_rounding_effects_equal_those_on_a_cpu(pair: tuple[TorchEngine, ...], texts: list[list[int]]) -> None:
    fed = [
        Fed(texts[0][:200], [(150, False), (3, True), (40, False), (7, True)]),
        Fed(texts[1][:400], [(300, False), (100, True)]),
        Fed(texts[2][:1], [(1, False)]),
    ]
    replays = [engine.replay(fed, rounding=2.0**-12) for engine in pair]
    (ours, off), (theirs, theirs_off) = (
        [np.concatenate([getattr(replay, rows) for replay in device_replays]) for rows in ("logits", "disturbed")]
        for device_replays in replays
    )
    assert_close(ours, theirs)
    moved, expected = (float(np.median(np.linalg.norm(a - b, axis=-1))) for a, b in ((off, ours), (theirs_off, theirs)))
    assert 0.5 < moved / expected < 2
    repeated = pair[0].replay(fed)
    assert_close(np.concatenate([replay.logits for replay in repeated]), ours)
    assert pair[0].device == CUDA
    weights = {weight.dtype for weight in pair[0].model.parameters()}
    assert weights == {torch.float16}, "the model keeps the checkpoint's 16-bit weights after a pass"


def test_a_replay_over_the_same_codes_equals_the_cpus(pair: tuple[TorchEngine, ...], texts: list[list[int]]) -> None:
    gpu, cpu = pair
    policy = cpu.policy
    tokens = texts[3][:330]
    copies: list[dict[Side, StoredCopy]] = []
    if policy.eviction is None and policy.window is None:
        handles, _ = cpu.prefill([tokens[:300]])
        for token in tokens[300:]:
            cpu.decode(handles, [token])
        copies = cpu.stored(handles[0])
        cpu.release(handles)
    fed = Fed(tokens, [(100, False), (200, False), (30, True)])
    ours, theirs = (engine.replay([fed], [copies], rounding=2.0**-22)[0].tail(30) for engine in pair)
    if copies:
        limit = REPLAYED_EXACT if policy.exact_tokens else REPLAYED
        assert distance(ours.logits, theirs.logits) < limit
        assert distance(ours.disturbed, theirs.disturbed) < limit
    else:
        assert_close(ours.logits, theirs.logits)
    for layer, expected in zip(ours.errors, theirs.errors, strict=True):
        assert layer.keys() == expected.keys()
        for side, errors in layer.items():
            assert errors.engine.device.type == "cpu"
            np.testing.assert_allclose(errors.engine, expected[side].engine, atol=1e-3)
            np.testing.assert_allclose(errors.disturbed, expected[side].disturbed, atol=1e-3)
    assert gpu.memory().live_tokens == 0


def test_a_full_gpu_is_reported_in_one_line(tmp_path: Path, tiny_checkpoint: Path) -> None:
    bundle = make_reference_bundle(tiny_checkpoint, tmp_path / "b", INT8)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(MissingRequirement, match=r"backend\.gpu_memory_utilization.*reference\.device=cpu$"):
            load_engine(bundle, threads=1, device=CUDA)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_command_line_judges_kernels_on_the_same_gpu(tmp_path: Path) -> None:
    candidate = judge_on_gpu(tmp_path, (0, 3), "reference.device=cuda")
    beside = [check for check in candidate["checks"] if check["gate"] in ("conformance", "stress_test")]
    assert {(check["gate"], check["status"]) for check in beside} == {("conformance", "PASS"), ("stress_test", "PASS")}, beside
