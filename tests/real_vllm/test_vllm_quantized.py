"""Checkpoints whose weights are quantized already on vLLM's CPU build: served as they are, with the scales of the cache."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_checkpoints import quantize_checkpoint
from vllm_bundles import make_vllm_bundle, open_vllm

from pipeline.checkpoint.description import inspect_checkpoint
from stages.checkpoints import load_causal_lm, load_tokenizer
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.model import round_inputs
from stages.evaluate.delivery import audit_scales
from stages.evaluate.distances.distance import kl_of_rows
from stages.quantize.dequantize import write_plain
from stages.workloads import generate

FIRST = 60
FORMS = os.environ.get("QUANTIZED_FORMS", "W8A8 INT8,W4A16").split(",")


@pytest.mark.parametrize("form", FORMS)
def test_stored_weights_are_computed_with_as_they_are(
    form: str, tiny_checkpoint: Path, vllm_python: str, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)
    bundle = make_vllm_bundle(tmp_path / "given", tmp_path / "bundle", "fp8", vllm_python)
    tokenizer = load_tokenizer(tiny_checkpoint)
    stories = (tokenizer(sample.prompt or sample.reference)["input_ids"] for sample in generate("prose", 40, 0))
    story = next(story for story in stories if len(story) >= 160)[:160]
    engine = open_vllm(bundle, vllm_python)
    rows = engine.forced(story, FIRST)
    assert audit_scales(engine, ()) == []
    engine.close()
    found = {}
    for name, checkpoint in (("stored", tmp_path / "plain"), ("before", tiny_checkpoint)):
        model = load_causal_lm(checkpoint, dtype=torch.float32)
        round_inputs(model)
        oracle = OracleEngine.from_model(model, engine.policy, engine._scales)
        expected = oracle.forced(story, FIRST)
        found[name] = float(np.mean([kl_of_rows(a, b[None])[0] for a, b in zip(expected, rows, strict=True)]))
    print(form, found)
    assert found["stored"] < 0.02
