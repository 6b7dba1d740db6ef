"""The exporter's refusals, files and memory use. test_families.py checks the results of its graphs."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_fixtures import (
    forced,
    make_bundle,
    make_decoder,
    save_model,
    shared_checkpoint,
    shared_decoder,
)
from transformers import LlamaConfig

from stages.engines.onnx import weights
from stages.engines.onnx.engine import load_engine
from stages.policies.policy import FP16_POLICY

SIZE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 128,
}  # fmt: skip


def test_no_weight_stays_in_memory_after_an_export(tmp_path: Path) -> None:
    make_decoder(save_model(LlamaConfig(**SIZE, head_dim=16), tmp_path / "checkpoint"), tmp_path / "decoder")
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    assert [found.shape for found in tensors if sorted(found.shape) == [48, 64]] == []


def test_weights_of_16_bits_stay_so_on_disk_and_no_logit_changes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = make_bundle(shared_decoder(tmp_path_factory, "float32", torch.bfloat16), tmp_path / "narrow_bundle", FP16_POLICY)
    checkpoint = shared_checkpoint(tmp_path_factory, torch.bfloat16)
    monkeypatch.setattr(weights, "SIXTEEN_BITS", ())
    wide = make_bundle(make_decoder(checkpoint, tmp_path / "wide"), tmp_path / "wide_bundle", FP16_POLICY)
    stored, before = ((bundle / "weights.bin").stat().st_size for bundle in (narrow, wide))
    assert stored < 0.6 * before
    texts = [[5, 6, 7, 8, 9], list(range(70))]
    logits, expected = (forced(load_engine(bundle, threads=1), texts) for bundle in (narrow, wide))
    assert np.array_equal(logits, expected)
