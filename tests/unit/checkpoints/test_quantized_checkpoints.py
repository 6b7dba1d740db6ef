"""Checkpoints with quantized weights: their declarations, and the dequantized values."""

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMS, quantize_checkpoint
from safetensors.torch import load_file, save_file
from shipped import SHIPPED

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.finite import check_finite
from stages.checkpoints.loading import expected_tensors, load_causal_lm
from stages.checkpoints.quantized import SERVED
from stages.checkpoints.weights import check_weights
from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.engines.reference.model import round_inputs
from stages.engines.trtllm.backend import refuse
from stages.policies.policy import Side
from stages.quantize.export import as_given
from stages.quantize.materialize import copy_without_scales, own_scales, write_plain

TITLES = {
    "W8A8 INT8": ("compressed-tensors int-quantized", "int8_token"),
    "FP8": ("compressed-tensors float-quantized", "other"),
    "W4A16": ("compressed-tensors pack-quantized", "exact"),
    "ModelOpt FP8": ("modelopt", "other"),
    "AWQ": ("awq 4 bits", "exact"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_described_and_dequantized_to_the_numbers_that_it_stands_for(
    form: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    numbers = quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    info = inspect_checkpoint(tmp_path / "given")
    assert info.quantized is not None
    assert (info.quantized.title, info.quantized.inputs) == TITLES[form]
    check_weights(info, expected_tensors)
    check_finite(info)
    write_plain(info, tmp_path / "plain", lambda *_: None)
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == numbers.keys()
    for name, weight in numbers.items():
        assert torch.equal(written[name], weight), name
    assert inspect_checkpoint(tmp_path / "plain").quantized is None
    check_weights(inspect_checkpoint(tmp_path / "plain"), expected_tensors)


def test_the_scales_of_a_cache_are_read_and_left_out_of_what_is_served(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8", cache_scale=0.5)
    info = inspect_checkpoint(tmp_path / "given")
    check_weights(info, expected_tensors)
    fp8 = SHIPPED["fp8"]
    scales = own_scales(info.path, fp8, info.shape)
    assert scales is not None
    assert [scales.layers[1][side].scale for side in (Side.KEY, Side.VALUE)] == [(0.125,), (0.0625,)]
    assert own_scales(info.path, SHIPPED["fp8_head"], info.shape) is None
    copy_without_scales(info, tmp_path / "served")
    given, served = (load_file(folder / "model.safetensors") for folder in (info.path, tmp_path / "served"))
    assert given.keys() - served.keys() == {name for name in given if name.endswith(("k_scale", "v_scale"))}


def test_the_reference_multiplies_int8_codes_where_the_engine_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    numbers = quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8")
    stored = load_file(tmp_path / "given" / "model.safetensors")
    write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)
    model = load_causal_lm(tmp_path / "plain", dtype=torch.float32)
    round_inputs(model)
    layer = "model.layers.1.mlp.up_proj"
    token = torch.linspace(-3, 1, numbers[f"{layer}.weight"].shape[1]) ** 3
    codes, step = (token * (127 / 27)).round().to(torch.int64), 27 / 127  # the largest magnitude is 27
    exact = (stored[f"{layer}.weight"].to(torch.int64) @ codes).float() * stored[f"{layer}.weight_scale"][:, 0] * step
    torch.testing.assert_close(model.get_submodule(layer)(token[None])[0], exact)
    assert not torch.allclose(numbers[f"{layer}.weight"] @ token, exact)


@pytest.mark.parametrize("form", ["ModelOpt FP8", "W8A8 INT8"])
def test_tensorrt_llm_is_given_the_weights_that_modelopt_wrote_and_no_others(
    form: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    info = inspect_checkpoint(tmp_path / "given")
    policy = SHIPPED["fp8"]
    copy_without_scales(info, tmp_path / "made" / SERVED)
    report = as_given(tmp_path / "made" / SERVED, tmp_path / "unified_hf", policy)
    engine, pytorch = (refuse(target, policy, "none", info, 1) for target in ("engine", "pytorch"))
    assert "backend.target=engine: weights that are quantized already; use backend=vllm" in str(engine)
    assert report["tensorrt_llm"] is not None
    assert (report["unified_hf"] is None) is (form == "ModelOpt FP8") is (pytorch is None)
    if pytorch is None:
        declared = json.loads((tmp_path / "unified_hf" / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
        assert declared == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        assert inspect_checkpoint(tmp_path / "unified_hf").quantized == info.quantized
        assert file_digest(tmp_path / "unified_hf" / "model.safetensors") == file_digest(info.path / "model.safetensors")


def test_a_code_that_is_no_number_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "FP8")
    stored = load_file(tmp_path / "given" / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 4] = 0xFF
    save_file(stored, tmp_path / "given" / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN"):
        check_finite(inspect_checkpoint(tmp_path / "given"))


def test_a_scale_that_does_not_fit_its_codes_is_refused_by_the_layer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8")
    stored = load_file(tmp_path / "given" / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(7, 1)
    save_file(stored, tmp_path / "given" / "model.safetensors")
    with pytest.raises(UserError, match=r"^model\.path=.*cannot decompress model\.layers\.0\.mlp\.up_proj \(.*; download"):
        write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)


def test_weights_with_scales_by_blocks_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "FP8")
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "block"
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"group_0\.weights\.strategy='block': kvgate reads tensor, channel, group; give"):
        inspect_checkpoint(tmp_path / "given")
