"""ModelOpt's quantizers and exporters, called directly: what they drop, bypass or mislabel is caught."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import POLICIES, quantized_model

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.core.errors import UserError
from pipeline.core.kv import Side
from pipeline.core.scales import KVScales, SideScales
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.run import load_model
from stages.quantize.validate import ExportMismatch, validate_unified_hf


def test_a_model_without_the_quantizers_of_a_policy_is_an_error_before_any_text_runs(tiny_checkpoint: Path) -> None:
    """ModelOpt ignores a name that matches nothing, as of attention that it cannot hook, and would leave the cache exact."""
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with pytest.raises(RuntimeError, match=r"8 quantizers instead of 10: missing model.layers.4.self_attn.k_bmm_quantizer"):
        adapter.measure(model, 5, "none", lambda _: pytest.fail("a text ran"), tiny_checkpoint)


def test_a_quantizer_that_attention_bypasses_is_an_error(tiny_checkpoint: Path) -> None:
    model = load_model(inspect_checkpoint(tiny_checkpoint))

    def keys_alone(model: Any) -> None:
        model.get_submodule("model.layers.0.self_attn.k_bmm_quantizer")(torch.ones(1, 2, 3, 64))

    with pytest.raises(RuntimeError, match=r"model.layers.0.self_attn.v_bmm_quantizer was never called"):
        adapter.measure(model, 1, "none", keys_alone, tiny_checkpoint)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named_by_layer_and_side(bad: float, tiny_checkpoint: Path) -> None:
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with torch.no_grad():
        model.get_submodule("model.layers.2.self_attn.v_proj").weight[0, 0] = bad  # type: ignore[operator]
    with pytest.raises(UserError, match=r"model\.path=.*: the values of layer 2 are not finite on the calibration texts"):
        adapter.measure(model, 4, "none", lambda m: m(torch.tensor([[1, 2]])), tiny_checkpoint)


def test_the_exporters_lies_are_caught(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """ModelOpt exports these without a word; the validators must not let them through."""
    model, scales = quantized_model(tiny_checkpoint, POLICIES["int8"])
    adapter.cast_for_export(model, torch.float16)
    adapter.export_unified_hf(model, tmp_path)
    declared = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"]
    assert declared == "INT8"
    # The label may not pass as plain FP8 when the scales of the values are missing or mean something else.
    one = SideScales(scale=(1.0,))
    claimed = KVScales(layers=tuple({Side.KEY: layer.get(Side.KEY, one), Side.VALUE: one} for layer in scales.layers))
    with pytest.raises(ExportMismatch):
        validate_unified_hf(tmp_path, POLICIES["fp8"], "none", 4, claimed)
