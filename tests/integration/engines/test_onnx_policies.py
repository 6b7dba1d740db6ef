"""Every KV policy on the ONNX engine against the reference engine: two independent implementations of the same policies.

Policies run with the graph's own attention, which TensorRT plans are built from. test_native_attention.py compares the
compiled kernel with the graph.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers.engines.random_llama import (
    BY_NAME,
    POLICIES,
    STEPS,
    forced,
    make_engine,
    make_reference,
    random_texts,
    shared_decoder,
)

from stages.engines.onnx.bundle import GRAPH
from stages.engines.onnx.engine import OnnxEngine
from stages.engines.reference.engine import TorchEngine

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 190, 300]
"""Lengths around the ends of pages. While 190 decodes, a page leaves a window of 64 tokens; no policy keeps 300 exact."""
ROUNDING = 2e-5
"""Allowed difference from the order of float32 sums: measured 4e-6 with logits of standard deviation 0.9."""
FLIPS = 1e-2
"""Allowed difference of a row after codes flip.

A key or value between two codes may get the other code, a step of its format away, because of float32 rounding. This
happens in a few rows per policy: measured at most 5e-3 (INT4). Key scales that are 4 times too large move every row by at
least 0.1.
"""
MEDIAN = 1e-4
"""Allowed difference of the median row, without coarse flips.

Measured at most 7e-5, for fine formats (bfloat16, int8), where flips are frequent but matter little. Coarser formats stay
below 3e-5. For comparison, INT8 as a whole moves a row by 1e-3.
"""


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return random_texts(LENGTHS)


@pytest.fixture(scope="module", params=POLICIES, ids=lambda policy: policy.name)
def pair(
    request: pytest.FixtureRequest, model: torch.nn.Module, decoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OnnxEngine, TorchEngine]:
    """The engine and the reference engine of a policy. Tests must leave no sequences and no faults behind."""
    bundle = tmp_path_factory.mktemp("bundles") / "bundle"
    engine = make_engine(decoder, bundle, request.param, attention="graph")
    onnx.checker.check_model(onnx.load(bundle / GRAPH))
    return engine, make_reference(model, request.param, engine.shape)


def differences(engine: OnnxEngine, reference: TorchEngine, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return all logits of the engine, and each decoded row's largest difference (STEPS, B) from the reference engine."""
    logits = forced(engine, texts)
    expected = np.stack([reference.forced(text, len(text) - STEPS) for text in texts], axis=1)
    return logits, np.abs(logits[1:] - expected).max(-1)


@pytest.mark.every
def test_batched_decode_equals_the_reference_and_single_runs(
    pair: tuple[OnnxEngine, TorchEngine], model: torch.nn.Module, texts: list[list[int]]
) -> None:
    logits, difference = differences(*pair, texts)
    assert difference.max() < FLIPS
    assert np.median(difference) < MEDIAN
    for i in (0, 3, 6):
        np.testing.assert_allclose(forced(pair[0], texts[i : i + 1])[:, 0], logits[:, i], atol=ROUNDING)
    # The logits of a one-chunk prompt do not depend on the cache.
    with torch.no_grad():
        expected = [model(torch.tensor([text[:-STEPS]])).logits[0, -1].numpy() for text in texts]
    np.testing.assert_allclose(logits[0], expected, atol=ROUNDING)


@pytest.mark.every
def test_a_corrupted_key_scale_changes_decode_and_not_prefill(
    pair: tuple[OnnxEngine, TorchEngine], texts: list[list[int]]
) -> None:
    engine, reference = pair
    text = texts[-1]
    sound = forced(engine, [text])
    handles, _ = engine.prefill([text[:-STEPS]])
    for corrupted in pair:
        corrupted.corrupt_key_scale(4.0)
    try:
        stored_before = engine.decode(handles, text[-STEPS : 1 - STEPS])
        faulty, difference = differences(engine, reference, [text])
        assert difference.max() < 4 * FLIPS
        np.testing.assert_array_equal(faulty[0], sound[0])
        np.testing.assert_allclose(faulty[1], stored_before, atol=ROUNDING)
        assert np.abs(faulty[1:] - sound[1:]).max(-1).min() > 10 * FLIPS
    finally:
        engine.release(handles)
        for corrupted in pair:
            corrupted.corrupt_key_scale(1 / 4)


@pytest.mark.every
def test_memory_is_the_policys_arithmetic(pair: tuple[OnnxEngine, TorchEngine], texts: list[list[int]]) -> None:
    engine, _ = pair
    handles, _ = engine.prefill(texts)
    report, policy, shape = engine.memory(), engine.policy, engine.shape
    engine.release(handles)
    arrays = engine.pool.arrays
    assert report.pool_bytes == policy.pool_bytes(shape, report.pages)
    assert report.exact_bytes == policy.exact_bytes(shape, 16)
    window = {name: array for name, array in arrays.items() if name.startswith("window")}
    pages = max((len(array) for array in window.values()), default=0)
    assert report.window_bytes == pages * policy.window_page_bytes(shape) == sum(array.nbytes for array in window.values())
    assert report.pool_bytes + report.exact_bytes + report.window_bytes == sum(array.nbytes for array in arrays.values())
    assert report.live_tokens == sum(len(text) - 64 * len(policy.evicted_pages(len(text), shape)) for text in texts)


CHUNKED = ["fp8k_int4v", "sinks_over_a_page", "ages", "overridden_window", "sliding", "streaming", "evicted_ages"]


@pytest.mark.parametrize("name", CHUNKED)
def test_later_prefill_chunks_read_the_quantized_cache(
    name: str, model: torch.nn.Module, decoder: Path, tmp_path: Path, texts: list[list[int]]
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], prefill_chunk=50)
    reference = make_reference(model, BY_NAME[name], engine.shape, prefill_chunk=50)
    logits, difference = differences(engine, reference, texts[-3:])
    assert difference.max() < FLIPS
    expected = reference.prefill([text[:-STEPS] for text in texts[-3:]])[1]
    np.testing.assert_allclose(logits[0], expected, atol=FLIPS)


@pytest.mark.parametrize("name", ["fp16", "fp8k_int4v"])
def test_float16_compute_stays_close_to_float32(
    name: str, decoder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]
) -> None:
    """Bound the effect of float16 compute.

    float16 rounds every activation (2**-11) over two layers: 3 % of the logits' standard deviation. Keys and values that
    move by this may get other codes, and an INT4 step is up to 14 % of a value: measured 8 %, allowed 20 %.
    """
    half = make_engine(shared_decoder(tmp_path_factory, "float16"), tmp_path / "half", BY_NAME[name])
    single = make_engine(decoder, tmp_path / "single", BY_NAME[name])
    logits, expected = forced(half, texts), forced(single, texts)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol={"fp16": 0.03, "fp8k_int4v": 0.2}[name] * expected.std())
    assert not np.array_equal(logits, expected)
