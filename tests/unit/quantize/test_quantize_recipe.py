"""Recipes, static scales and texts: data in, data out."""

from pathlib import Path

import pytest
import torch
from onnx_fixtures import BF16, FP8, FP16, fmt

from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal
from stages.core.errors import UserError
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Side, Window
from stages.quantize.calibration import tokenize
from stages.quantize.recipe import check_enabled
from stages.quantize.run import calibration_device
from stages.quantize.scales import Extremes, Measured, static_scales

SMALL = KVShape(layers=2, kv_heads=2, head_dim=16)


INT8 = Format(dtype="int8", granularity="per_token", scale="dynamic")


def policy(key: Format, value: Format, window: Window | None = None, *overrides: LayerOverride) -> KVPolicy:
    return KVPolicy(name="test", key=key, value=value, window=window, overrides=overrides)


def test_a_missing_an_unexpected_and_another_quantizer_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"enabled 2 quantizers instead of 2: missing b; unexpected lm_head\.w"):
        check_enabled({"a": {}, "b": {}}, {"a": {}, "lm_head.w": {}})
    with pytest.raises(RuntimeError, match=r"a: ModelOpt set num_bits=8, asked for 4"):
        check_enabled({"a": {"num_bits": 4, "block_sizes": {}}}, {"a": {"num_bits": 8, "axis": None}})
    check_enabled({"a": {"num_bits": 4}}, {"a": {"num_bits": 4, "axis": None}})


def extremes(low: tuple[float, ...], high: tuple[float, ...]) -> Extremes:
    return Extremes(low, high, tuple(max(-bottom, top) for bottom, top in zip(low, high, strict=True)))


def measured(key: Extremes | None = None, value: Extremes | None = None) -> Measured:
    sides = {Side.KEY: key, Side.VALUE: value}
    return {"none": {(layer, side): x for layer in range(2) for side, x in sides.items() if x is not None}}


def test_a_dead_channel_gets_a_scale_that_divides(tmp_path: Path) -> None:
    extremes_by_place = measured(key=extremes((0.0, -1e-44) + (-7.0,) * 30, (0.0,) * 32))
    scales = static_scales(policy(fmt("int4", "per_channel"), FP16), SMALL, extremes_by_place, tmp_path)
    smallest_normal = 2.0**-126
    assert scales.layers[0][Side.KEY].scale == (smallest_normal, smallest_normal, *(1.0,) * 30)


def test_a_side_that_is_all_zero_is_refused(tmp_path: Path) -> None:
    zeros = extremes((0.0,), (0.0,))
    with pytest.raises(UserError, match=r"model\.path=.*: the values of layer 0 are all 0 on the calibration texts"):
        static_scales(policy(FP16, FP8), SMALL, measured(value=zeros), tmp_path)


ROTATED = fmt("fp8_e4m3", "per_tensor", rotation="hadamard")
ZEROS = fmt("int8", "per_tensor", symmetric=False)
PER_HEAD = fmt("fp8_e4m3", "per_head")


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        (KVPolicy(name="sinks", key=FP8, value=FP8, sink_tokens=4), "4 sink and 0 recent exact tokens"),
        (policy(FP8, FP8, Window(tokens=128, value=FP8)), "other formats for the last 128 tokens"),
        (policy(FP8, FP8, None, LayerOverride(layers=(0,), key=INT8)), "overrides.0.key int8 per_token"),
        (policy(FP8, fmt("int8", "per_tensor")), "key fp8_e4m3 per_tensor, value int8 per_tensor"),
        (policy(ROTATED, ROTATED), "fp8_e4m3 per_tensor rotation=hadamard keys and values"),
        (policy(ZEROS, ZEROS), "int8 per_tensor asymmetric keys and values"),
        (policy(PER_HEAD, PER_HEAD), "fp8_e4m3 per_head keys and values"),
    ],
)
def test_what_no_export_can_declare_is_explained(kv: KVPolicy, reason: str) -> None:
    for algorithms in (UNIFIED_HF_KV, TENSORRT_LLM_KV):
        assert reason in str(export_refusal(kv, algorithms))


def test_an_override_with_the_format_of_the_rest_and_an_exact_cache_can_be_declared() -> None:
    for kv in (policy(FP8, FP8, None, LayerOverride(layers=(0,), key=FP8)), FP16_POLICY):
        assert export_refusal(kv, UNIFIED_HF_KV) is None
    refusal = export_refusal(policy(BF16, BF16), UNIFIED_HF_KV)
    assert refusal is not None
    assert "the export has no name for this format" in refusal


class Words:
    """A tokenizer with one id per word: the word's length."""

    bos_token = None

    def __call__(self, text: str, add_special_tokens: bool, truncation: bool, max_length: int) -> dict[str, list[int]]:
        assert add_special_tokens
        assert truncation
        return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_texts_are_cut_and_empty_ones_left_out() -> None:
    assert tokenize(Words(), ["a bb ccc", "", "dd"], 2, 10) == [[1, 2], [2]]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"makes token 4, the model's vocab_size is 4"):
        tokenize(Words(), ["four"], 8, 4)


@pytest.mark.parametrize(("found", "means"), [(False, "cpu"), (True, "cuda")])
def test_models_are_calibrated_on_a_gpu_if_there_is_one(found: bool, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert calibration_device().type == means
