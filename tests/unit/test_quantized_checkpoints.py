"""Checkpoints whose weights are quantized already: what they declare, and the numbers that their weights stand for."""

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMS, quantize_checkpoint
from safetensors.torch import load_file
from trtllm_exports import conf

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.weights import check_weights
from pipeline.core.kv import KVPolicy, Side
from stages.checkpoints import expected_tensors
from stages.quantize.dequantize import copy_without_scales, own_scales, write_plain

TITLES = {
    "W8A8 INT8": ("compressed-tensors int-quantized", True),
    "FP8": ("compressed-tensors float-quantized", True),
    "W4A16": ("compressed-tensors pack-quantized", False),
    "ModelOpt FP8": ("modelopt", True),
    "FP8 by blocks": ("fp8", True),
    "GPTQ": ("gptq 4 bits", False),
    "AWQ": ("awq 4 bits", False),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_described_and_dequantized_to_the_numbers_that_it_stands_for(
    form: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    numbers = quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    info = inspect_checkpoint(tmp_path / "given")
    assert info.quantized is not None
    assert (info.quantized.title, info.quantized.rounds_inputs) == TITLES[form]
    check_weights(info, expected_tensors)
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
    fp8 = KVPolicy.model_validate(conf("kv", "fp8"))
    scales = own_scales(info.path, fp8, info.shape)
    assert scales is not None
    assert [scales.layers[1][side].scale for side in (Side.KEY, Side.VALUE)] == [(0.125,), (0.0625,)]
    assert own_scales(info.path, KVPolicy.model_validate(conf("kv", "fp8_head")), info.shape) is None
    copy_without_scales(info, tmp_path / "served")
    given, served = (load_file(folder / "model.safetensors") for folder in (info.path, tmp_path / "served"))
    assert given.keys() - served.keys() == {name for name in given if name.endswith(("k_scale", "v_scale"))}
