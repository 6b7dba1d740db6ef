"""A bundle of the torch backend on disk: complete, verified, and refused if changed."""

import json
from pathlib import Path

import numpy as np
import pytest
from onnx_fixtures import BY_NAME, load_model, make_reference, make_reference_bundle, shared_checkpoint

from stages.engines.reference.engine import load_engine
from stages.policies.policy import KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
POLICY = BY_NAME["window_of_keys_and_values"]
TEXT = list(range(100))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_checkpoint(tmp_path_factory)


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path) -> Path:
    return make_reference_bundle(checkpoint, tmp_path / "bundle", POLICY)


def test_a_bundle_is_all_that_the_engine_needs_but_nothing_that_its_owner_overwrites(checkpoint: Path, bundle: Path) -> None:
    assert not (bundle / "model.safetensors").samefile(checkpoint / "model.safetensors"), "it is outside of any store"
    engine = load_engine(bundle, threads=1)
    assert (engine.policy, engine.shape, engine.vocab_size) == (POLICY, SHAPE, 256)
    expected = make_reference(load_model(checkpoint), POLICY, SHAPE).forced(TEXT, 70)
    np.testing.assert_array_equal(engine.forced(TEXT, 70), expected)


def test_a_bundle_of_another_backend_and_senseless_options_are_refused(bundle: Path) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        load_engine(bundle, threads=0)
    record = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps({**record, "backend": "onnxruntime", "graph_digest": "0"}))
    with pytest.raises(ValueError, match="backend=onnxruntime, this engine loads backend=torch"):
        load_engine(bundle, threads=1)
