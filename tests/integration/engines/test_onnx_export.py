"""The exporter's files and memory use. test_families.py checks the results of its graphs."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_fixtures import forced, llama_config, make_bundle, make_decoder, save_model

from stages.engines.onnx import weights
from stages.engines.onnx.engine import load_engine
from stages.policies.policy import FP16_POLICY


def test_weights_of_16_bits_stay_so_on_disk_no_logit_changes_and_no_weight_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use matrices of a shape that no other test has."""
    config = llama_config()
    config.update({"num_hidden_layers": 1, "intermediate_size": 208})
    checkpoint = save_model(config, tmp_path / "checkpoint", torch.bfloat16)
    narrow = make_bundle(make_decoder(checkpoint, tmp_path / "narrow"), tmp_path / "narrow_bundle", FP16_POLICY)
    monkeypatch.setattr(weights, "SIXTEEN_BITS", ())
    wide = make_bundle(make_decoder(checkpoint, tmp_path / "wide"), tmp_path / "wide_bundle", FP16_POLICY)
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    assert [found.shape for found in tensors if sorted(found.shape) == [128, 208]] == []
    stored, before = ((bundle / "weights.bin").stat().st_size for bundle in (narrow, wide))
    assert stored < 0.6 * before
    texts = [[5, 6, 7, 8, 9], list(range(70))]
    logits, expected = (forced(load_engine(bundle, threads=1), texts) for bundle in (narrow, wide))
    assert np.array_equal(logits, expected)
