"""Checkpoints with quantized weights on vLLM's CPU build: served unchanged, with the cache's scales."""

from pathlib import Path

import pytest
import torch
from engine_rows import FIRST, mean_kl, two_stories
from interpreter_bundles import KEY_SCALE, make_bundle, open_engine
from quantized_checkpoints import quantize_checkpoint
from safetensors import safe_open

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm
from stages.engines.interpreter.bundle import CHECKPOINT
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import round_inputs
from stages.evaluate.measure import audit_scales
from stages.policies.policy import Side
from stages.quantize.materialize import write_plain


@pytest.mark.parametrize(
    ("form", "kv", "stored_as"),
    [
        ("W8A8 INT8", "fp8", {"weight": "I8"}),
        ("W4A16", "fp8", {"weight_packed": "I32"}),
        ("AWQ", "fp8_e5m2", {"qweight": "I32"}),
    ],
)
def test_stored_weights_are_computed_with_as_they_are(
    form: str, kv: str, stored_as: dict[str, str], tiny_checkpoint: Path, vllm_python: str, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)
    bundle = make_bundle("vllm", tmp_path / "given", tmp_path / "bundle", kv, vllm_python)
    story = two_stories(tiny_checkpoint)[0]
    engine = open_engine(bundle, vllm_python)
    rows = engine.forced(story, FIRST)
    assert audit_scales(engine, ()) == []
    assert engine.delivery()[0].used[Side.KEY] == pytest.approx((KEY_SCALE if kv == "fp8" else 1.0,))
    engine.close()
    model = load_causal_lm(tmp_path / "plain", dtype=torch.float32)
    round_inputs(model)
    expected = TorchEngine.from_model(model, engine.policy, engine._scales).forced(story, FIRST)
    assert mean_kl(expected, rows) < 0.01
    with safe_open(bundle / CHECKPOINT / "model.safetensors", "pt") as stored:
        assert {part: stored.get_slice(f"model.layers.0.mlp.up_proj.{part}").get_dtype() for part in stored_as} == stored_as
