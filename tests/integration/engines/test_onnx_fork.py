"""Prefix sharing: shared, copied and freed pages."""

from pathlib import Path

import numpy as np
import pytest
from onnx_fixtures import BY_NAME, make_engine

from stages.core.errors import UserError
from stages.engines.onnx.engine import OnnxEngine

PAGED = ["fp16", "int4_g32_asym_hadamard", "ages", "window_of_keys_and_values", "streaming", "evicted_ages"]


@pytest.fixture(scope="module")
def text() -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 256, 300).tolist()
    return tokens


def decode(engine: OnnxEngine, handle: int, tokens: list[int]) -> np.ndarray:
    return np.array([engine.decode([handle], [token])[0] for token in tokens])


@pytest.mark.parametrize("length", [64, 130])
@pytest.mark.parametrize("name", PAGED)
def test_a_fork_and_its_origin_decode_like_sequences_prefilled_alone(
    name: str, length: int, decoder: Path, tmp_path: Path, text: list[int]
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name])
    prompt, ends = text[:length], [text[200:270], text[230:300]]
    alone = []
    for end in ends:
        (handle,), _ = engine.prefill([prompt])
        alone.append(decode(engine, handle, end))
        engine.release([handle])
    (origin,), _ = engine.prefill([prompt])
    fork = engine.fork(origin)
    batched = np.array([engine.decode([origin, fork], list(pair)) for pair in zip(*ends, strict=True)])
    np.testing.assert_allclose(batched[:, 0], alone[0], atol=2e-5)
    np.testing.assert_allclose(batched[:, 1], alone[1], atol=2e-5)
    engine.release([origin])
    late = engine.fork(fork)
    np.testing.assert_allclose(decode(engine, late, [1, 2]), decode(engine, fork, [1, 2]), atol=2e-5)
    engine.release([fork, late])
    assert engine.memory().live_tokens == 0
    assert engine.pool.in_use == (0, 0)


@pytest.mark.parametrize("cut", [1, 100])
@pytest.mark.parametrize("name", [*PAGED, "int8"])
def test_extending_a_sequence_is_prefilling_it_in_two_chunks(
    name: str, cut: int, decoder: Path, tmp_path: Path, text: list[int]
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], prefill_chunk=cut)
    (whole,), logits = engine.prefill([text[: 2 * cut]])
    (part,), _ = engine.prefill([text[:cut]])
    fork = engine.fork(part)
    np.testing.assert_array_equal(engine.extend(fork, text[cut : 2 * cut]), logits[0])
    np.testing.assert_array_equal(decode(engine, fork, text[200:203]), decode(engine, whole, text[200:203]))
    np.testing.assert_array_equal(engine.extend(part, text[cut : 2 * cut]), logits[0])
    engine.release([whole, part, fork])
    assert engine.pool.in_use == (0, 0)


def test_extending_refuses_what_prefill_refuses(decoder: Path, tmp_path: Path, text: list[int]) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME["int8"], max_pages=2)
    (handle,), _ = engine.prefill([text[:100]])
    with pytest.raises(UserError, match="at least one token"):
        engine.extend(handle, [])
    with pytest.raises(UserError, match="token ids must be in"):
        engine.extend(handle, [256_000])
    with pytest.raises(UserError, match="max_pages=2 is too small"):
        engine.extend(handle, text[:100])
    with pytest.raises(KeyError, match="released or never started"):
        engine.extend(handle + 1, [1])
