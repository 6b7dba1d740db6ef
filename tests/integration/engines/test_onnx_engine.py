"""The ONNX engine's refusals, and its state afterwards. Policies: test_onnx_policies.py. Families: test_families.py."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_fixtures import BY_NAME, make_bundle

from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.engines.onnx.engine import OnnxEngine, load_engine


def spoiled(bundle: Path, shape: tuple[int, int], number: int, row: int, by: float = np.nan) -> OnnxEngine:
    """Return an engine with `by` in one row of the `number`-th weight matrix of a shape, in the checkpoint's order."""
    tensors = onnx.load(bundle / "decode.onnx", load_external_data=False).graph.initializer
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


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("by", [np.nan, 1e6], ids=["nan", "beyond_float16"])
def test_keys_and_values_that_are_not_finite_are_refused_by_name(by: float, number: int, decoder: Path, tmp_path: Path) -> None:
    """In this model, only the projections to keys and values are square matrices."""
    engine = spoiled(make_bundle(decoder, tmp_path / "bundle", BY_NAME["ages"]), (128, 128), number, 5, by)
    name = ("key of layer 0", "value of layer 0", "key of layer 1", "value of layer 1")[number]
    with pytest.raises(UserError, match=f"model.path: {name}, token 0 of sequence 0 is not finite as a float16"):
        engine.prefill([[1, 2, 3]])
    assert engine.memory().live_tokens == 0


def test_a_token_whose_key_is_not_finite_leaves_nothing_in_the_cache(decoder: Path, tmp_path: Path) -> None:
    """Set the embedding of token 7 to NaN.

    The embedding is also the output matrix, so the logit of token 7 is NaN. The engine returns it, so that an evaluation
    sees NaN and fails the engine. Only generation refuses to choose a token from NaN logits.
    """
    engine = spoiled(make_bundle(decoder, tmp_path / "bundle", BY_NAME["ages"]), (256, 128), 0, 7)
    with pytest.raises(UserError, match="key of layer 0, token 2 of sequence 0 is not finite"):
        engine.prefill([[1, 2, 7, 4]])
    assert engine.memory().live_tokens == 0
    handles, logits = engine.prefill([[1] * 70, [2] * 3])
    with pytest.raises(UserError, match=f"token 3 of sequence {handles[1]} is not finite"):
        engine.decode(handles, [5, 7])
    assert engine.memory().live_tokens == 73
    decoded = engine.decode(handles, [5, 6])
    for each in (logits, decoded):
        assert np.isnan(each).nonzero()[1].tolist() == [7, 7]
    fresh, _ = engine.prefill([[1] * 70, [2] * 3])
    np.testing.assert_array_equal(engine.decode(fresh, [5, 6]), decoded)
    engine.release([*handles, *fresh])
    with pytest.raises(UserError, match="logits of sequence 5 after 3 tokens are not finite"):
        engine.generate([[1, 2, 3]], 4, ())
    assert engine.memory().live_tokens == 0
