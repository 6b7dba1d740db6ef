"""ModelOpt's quantizers and exporters, called directly: they round as a format says, and their lies are caught."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from quantize_fixtures import FP8, INT4_TENSOR, POLICIES, per_group, per_token, quantized_model, random_checkpoint
from safetensors.torch import load_file

from pipeline.checkpoint import inspect_checkpoint
from pipeline.kv import CODE_MAX, FP16_POLICY, Format, KVPolicy, KVScales
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.materialize import write_dequantized
from stages.quantize.recipe import KV_QUANTIZER, Side, make_recipe
from stages.quantize.run import dequantized_weights, load_model
from stages.quantize.scales import static_scales
from stages.quantize.validate import ExportMismatch, validate_unified_hf

torch.set_num_threads(1)


REFERENCE_FORMATS = [
    FP8,
    INT4_TENSOR,
    per_token("int8"),
    per_token("int4"),
    per_token("fp8_e4m3"),
    *(
        pytest.param(form, marks=pytest.mark.skipif(not adapter.GROUP_BACKEND_AVAILABLE, reason="ModelOpt >= 0.41"))
        for form in (per_group("int4", 64), per_group("int4", 32), per_group("int8", 16), per_group("fp8_e4m3", 64))
    ),
]


@pytest.mark.parametrize("form", REFERENCE_FORMATS, ids=lambda f: f"{f.dtype}_{f.granularity}_{f.group_size}")
def test_the_quantizers_round_as_the_format_says(form: Format, tiny_checkpoint: Path) -> None:
    """Two input shapes in a row, against codes and scales computed here."""
    model = quantized_model(tiny_checkpoint, KVPolicy(name="both", key=form, value=form))
    for side, states in (("key", (1, 2, 5, 64)), ("value", (1, 2, 9, 64))):
        quantizer = model.get_submodule(f"model.layers.1.self_attn.{KV_QUANTIZER[side]}")  # type: ignore[index]
        values = torch.randn(states, generator=torch.Generator().manual_seed(1))
        limit = CODE_MAX[form.dtype]
        grouped = values.unflatten(-1, (-1, form.group_size or 64))
        if form.static:
            scale = torch.tensor(adapter.kv_amax(model, side, 4)[1] / limit)  # type: ignore[arg-type]
        else:
            scale = grouped.abs().amax(-1, keepdim=True) / limit
        codes = (grouped / scale).clamp(-limit, limit)
        codes = codes.to(torch.float8_e4m3fn).float() if form.dtype == "fp8_e4m3" else codes.round()
        np.testing.assert_allclose(quantizer(values), (codes * scale).flatten(-2), rtol=1e-5, atol=1e-5)


def test_a_wildcard_that_matches_nothing_is_an_error(tiny_checkpoint: Path) -> None:
    recipe = make_recipe("none", POLICIES["fp8"], 4, group_backend=True)
    misspelt = replace(recipe, entries=(("*.kv_bmm_quantizer", {"num_bits": (4, 3), "axis": None}),))
    with pytest.raises(RuntimeError, match=r"enabled 0 quantizers instead of 8: missing model.layers.0.self_attn.k_bmm"):
        adapter.quantize_model(load_model(inspect_checkpoint(tiny_checkpoint)), misspelt, None)


def test_a_wildcard_that_matches_too_much_is_an_error(tiny_checkpoint: Path) -> None:
    recipe = make_recipe("none", POLICIES["fp16"], 4, group_backend=True)
    greedy = replace(recipe, entries=(("*weight_quantizer", {"num_bits": (4, 3), "axis": None}),))
    with pytest.raises(RuntimeError, match=r"missing none; unexpected lm_head.weight_quantizer"):
        adapter.quantize_model(load_model(inspect_checkpoint(tiny_checkpoint)), greedy, None)


@pytest.mark.parametrize("policy", ["fp8k_int4v", "int8"])
def test_the_exporters_lies_are_caught(policy: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """ModelOpt exports these without a word; the validators must not let them through."""
    model = quantized_model(tiny_checkpoint, POLICIES[policy])
    amax: dict[Side, list[float]] = {"key": adapter.kv_amax(model, "key", 4)} if policy == "fp8k_int4v" else {}
    scales = static_scales(POLICIES[policy], 4, amax, tiny_checkpoint)
    adapter.cast_for_export(model, torch.float16)
    adapter.export_unified_hf(model, tmp_path)
    declared = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"]
    assert declared == {"fp8k_int4v": "FP8", "int8": "INT8"}[policy]
    with pytest.raises(ExportMismatch):
        validate_unified_hf(tmp_path, POLICIES[policy], "none", 4, scales)
    # Nor may the label pass as plain FP8 when the scales of the values are missing or mean something else.
    claimed = KVScales(key=scales.key or (1.0,) * 4, value=(1.0,) * 4)
    with pytest.raises(ExportMismatch):
        validate_unified_hf(tmp_path, POLICIES["fp8"], "none", 4, claimed)


def test_dequantized_float32_weights_are_exact(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = random_checkpoint("Qwen3", tiny_checkpoint, tmp_path / "source")
    model = quantized_model(checkpoint, FP16_POLICY, "int4_awq")
    info = inspect_checkpoint(checkpoint)
    expected = dequantized_weights(model, info.shape.layers)
    write_dequantized(info, tmp_path / "out", expected)
    stored, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert stored.keys() == source.keys()
    for name, tensor in stored.items():
        if name in expected:
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, expected[name])
        else:
            assert torch.equal(tensor, source[name])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype is torch.float32
