"""The ONNX engine: refusals, the state after a refusal, bundles, forks and batches. Also bundles of backend=torch.

Policies: test_onnx_policies.py. Families: test_families.py.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers.engines.random_llama import (
    BY_NAME,
    load_model,
    make_bundle,
    make_engine,
    make_reference,
    make_reference_bundle,
    shared_checkpoint,
)
from onnx import helper, numpy_helper

from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.engines.interface import Continuation, Engine, Logits
from stages.engines.onnx.build import IR_VERSION
from stages.engines.onnx.bundle import GRAPH
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.onnx.weights import store_weights
from stages.engines.reference.engine import load_engine as load_reference_engine
from stages.policies.arithmetic_onnx import OPSET
from stages.policies.policy import KVShape


def load_with_bad_weights(bundle: Path, shape: tuple[int, int], number: int, row: int, by: float = np.nan) -> OnnxEngine:
    """Return an engine with `by` in one row of the `number`-th weight matrix of a shape, in the checkpoint's order."""
    tensors = onnx.load(bundle / GRAPH, load_external_data=False).graph.initializer
    places = [int({entry.key: entry.value for entry in tensor.external_data}["offset"])
              for tensor in tensors if tuple(tensor.dims) == shape]  # fmt: skip
    weights = bytearray((bundle / "weights.bin").read_bytes())
    first = places[number] + row * shape[1] * 4
    weights[first : first + shape[1] * 4] = np.full(shape[1], by, np.float32).tobytes()
    (bundle / "weights.bin").unlink()
    (bundle / "weights.bin").write_bytes(weights)
    described = json.loads((bundle / "bundle.json").read_text())
    described["files"]["weights.bin"] = file_digest(bundle / "weights.bin")
    (bundle / "bundle.json").write_text(json.dumps(described))
    return load_engine(bundle, threads=1)


@pytest.mark.parametrize(("number", "by"), [(0, np.nan), (1, np.nan), (2, 1e6), (3, 1e6)])
def test_keys_and_values_that_are_not_finite_are_refused_by_name(by: float, number: int, decoder: Path, tmp_path: Path) -> None:
    """In this model, only the projections to keys and values are square matrices."""
    engine = load_with_bad_weights(make_bundle(decoder, tmp_path / "bundle", BY_NAME["ages"]), (128, 128), number, 5, by)
    name = ("key of layer 0", "value of layer 0", "key of layer 1", "value of layer 1")[number]
    with pytest.raises(UserError, match=f"model.path: a {name} is not finite as a float16"):
        engine.prefill([[1, 2, 3]])
    assert engine.memory().live_tokens == 0


def test_a_token_with_a_non_finite_key_is_not_stored(decoder: Path, tmp_path: Path) -> None:
    """Set the embedding of token 7 to NaN.

    The embedding is also the output matrix, so the logit of token 7 is NaN. The engine returns it, so that an evaluation
    sees NaN and fails the engine. Only generation refuses to choose a token from NaN logits.
    """
    engine = load_with_bad_weights(make_bundle(decoder, tmp_path / "bundle", BY_NAME["ages"]), (256, 128), 0, 7)
    with pytest.raises(UserError, match="a key of layer 0 is not finite"):
        engine.prefill([[1, 2, 7, 4]])
    assert engine.memory().live_tokens == 0
    handles, logits = engine.prefill([[1] * 70, [2] * 3])
    with pytest.raises(UserError, match="a key of layer 0 is not finite"):
        engine.decode(handles, [5, 7])
    assert engine.memory().live_tokens == 73
    decoded = engine.decode(handles, [5, 6])
    for array in (logits, decoded):
        assert np.isnan(array).nonzero()[1].tolist() == [7, 7]
    fresh, _ = engine.prefill([[1] * 70, [2] * 3])
    np.testing.assert_array_equal(engine.decode(fresh, [5, 6]), decoded)
    engine.release([*handles, *fresh])
    with pytest.raises(UserError, match="logits of sequence 5 after 3 tokens are not finite"):
        engine.generate([[1, 2, 3]], 4, ())
    assert engine.memory().live_tokens == 0


def test_16_bit_weights_stay_16_bit_without_changing_results(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((256, 64)).astype(np.float16).astype(np.float32)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (3, 256))
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (3, 64))
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    file, feeds = tmp_path / "decoder.onnx", {"x": rng.standard_normal((3, 256)).astype(np.float32)}
    onnx.save(model, file, save_as_external_data=True, location="data", size_threshold=0)
    (expected,) = ort.InferenceSession(file).run(None, feeds)
    narrow = onnx.load(file, load_external_data=False)
    store_weights(narrow.graph, tmp_path / "data", tmp_path)
    onnx.save(narrow, file)
    assert (tmp_path / "weights.bin").stat().st_size == weights.nbytes // 2
    np.testing.assert_array_equal(ort.InferenceSession(file).run(None, feeds)[0], expected)


def test_an_altered_or_missing_file_is_refused_by_name(decoder: Path, tmp_path: Path) -> None:
    bundle = make_bundle(decoder, tmp_path / "bundle", BY_NAME["fp8"])
    for name in (GRAPH, "weights.bin", "kv_policy.json", "kv_scales.json"):
        sound = (bundle / name).read_bytes()
        altered = bytearray(sound)
        altered[len(sound) // 2] ^= 1
        (bundle / name).unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            load_engine(bundle, threads=1)
        (bundle / name).write_bytes(altered)
        with pytest.raises(UserError, match=f"{name} is not the file that was built"):
            load_engine(bundle, threads=1)
        (bundle / name).write_bytes(sound)


def test_a_graphs_digest_depends_on_the_policy_not_the_place(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "copy")
    digests = [
        file_digest(make_bundle(source, tmp_path / name, BY_NAME[policy]) / GRAPH)
        for name, source, policy in (("a", decoder, "fp8"), ("b", tmp_path / "copy", "fp8"), ("c", decoder, "fp8_uncalibrated"))
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


PAGED = ["int4_g32_asym_hadamard", "window_of_keys_and_values", "streaming", "evicted_ages"]


@pytest.fixture(scope="module")
def text() -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 256, 300).tolist()
    return tokens


def decode(engine: OnnxEngine, handle: int, tokens: list[int]) -> np.ndarray:
    return np.array([engine.decode([handle], [token])[0] for token in tokens])


@pytest.mark.parametrize("length", [64, 130])
@pytest.mark.parametrize("name", PAGED)
def test_a_fork_and_its_origin_decode_like_single_sequences(
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
    (unsplit,), logits = engine.prefill([text[: 2 * cut]])
    (part,), _ = engine.prefill([text[:cut]])
    fork = engine.fork(part)
    np.testing.assert_array_equal(engine.extend(fork, text[cut : 2 * cut]), logits[0])
    np.testing.assert_array_equal(decode(engine, fork, text[200:203]), decode(engine, unsplit, text[200:203]))
    np.testing.assert_array_equal(engine.extend(part, text[cut : 2 * cut]), logits[0])
    engine.release([unsplit, part, fork])
    assert engine.pool.in_use == (0, 0)


def test_extending_refuses_the_same_tokens_as_prefill(int8: Path, text: list[int]) -> None:
    engine = load_engine(int8, threads=1)
    engine.pool.max_pages = 2
    (handle,), _ = engine.prefill([text[:100]])
    for tokens, message in (([], "at least one token"), ([256_000], "token ids"), (text[:100], "max_pages=2 is too small")):
        with pytest.raises(UserError, match=message):
            engine.extend(handle, tokens)
    with pytest.raises(KeyError, match="released or never started"):
        engine.extend(handle + 1, [1])


SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
POLICY = BY_NAME["window_of_keys_and_values"]
TEXT = list(range(100))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_checkpoint(tmp_path_factory)


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path) -> Path:
    return make_reference_bundle(checkpoint, tmp_path / "bundle", POLICY)


def test_a_bundle_is_complete_and_shares_no_file_with_its_owner(checkpoint: Path, bundle: Path) -> None:
    assert not (bundle / "model.safetensors").samefile(checkpoint / "model.safetensors"), "files outside a store are copied"
    engine = load_reference_engine(bundle, threads=1)
    assert (engine.policy, engine.shape, engine.vocab_size) == (POLICY, SHAPE, 256)
    expected = make_reference(load_model(checkpoint), POLICY, SHAPE).forced(TEXT, 70)
    np.testing.assert_array_equal(engine.forced(TEXT, 70), expected)


def test_a_bundle_of_another_backend_is_refused(bundle: Path) -> None:
    record = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps({**record, "backend": "onnxruntime"}))
    with pytest.raises(ValueError, match="backend=onnxruntime, this engine loads backend=torch"):
        load_reference_engine(bundle, threads=1)


LENGTHS = (70, 1, 200, 3, 64, 129, 12)
LIMITS = (3, 12, 2, 9, 1, 5, 7)
PROMPTS: list[list[int]] = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in LENGTHS]


def record_logits(engine: Engine) -> dict[tuple[int, ...], bytes]:
    """Record the logits' bytes after every history that the engine continues; return the record."""
    rows, advance = {}, engine._advance

    def advanced(live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        ready, logits = advance(live)
        rows.update({tuple(request.tokens): row.tobytes() for request, row in zip(ready, logits, strict=True)})
        return ready, logits

    engine._advance = advanced  # type: ignore[method-assign]
    return rows


def answer_alone(engine: Engine) -> list[list[int]]:
    return [engine.generate([prompt], limit, ())[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize(("name", "attention"), [("fp8", "graph"), ("ages", "native")])
def test_logits_are_bitwise_independent_of_other_sequences(name: str, attention: Any, decoder: Path, tmp_path: Path) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], prefill_chunk=128, attention=attention)
    rows = record_logits(engine)
    expected = answer_alone(engine)
    exact = dict(rows)
    assert len(exact) == sum(LIMITS)
    for max_sequences in (2, 5, None):
        rows.clear()
        assert engine.generate(PROMPTS * 3, LIMITS * 3, (), max_sequences=max_sequences) == expected * 3
        assert rows == exact
    assert engine.pool.in_use == (0, 0)
