"""Recipes, static scales and texts."""

from pathlib import Path

import pytest
from helpers.engines.random_llama import BF16, FP8, FP16, fmt

from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal
from stages.core.errors import UserError
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Side, Window
from stages.quantize.calibration import tokenize
from stages.quantize.recipe import check_enabled
from stages.quantize.scales import Extremes, Measured, static_scales

SMALL = KVShape(layers=2, kv_heads=2, head_dim=16)


INT8 = Format(dtype="int8", granularity="per_token", scale="dynamic")


def policy(key: Format, value: Format, window: Window | None = None, *overrides: LayerOverride) -> KVPolicy:
    return KVPolicy(name="test", key=key, value=value, window=window, overrides=overrides)


def test_missing_unexpected_and_wrong_quantizers_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"enabled 2 quantizers instead of 2: b is missing"):
        check_enabled({"a": {}, "b": {}}, {"a": {}, "lm_head.w": {}})
    with pytest.raises(RuntimeError, match=r"a: ModelOpt set num_bits=8 instead of 4"):
        check_enabled({"a": {"num_bits": 4, "block_sizes": {}}}, {"a": {"num_bits": 8, "axis": None}})
    check_enabled({"a": {"num_bits": 4}}, {"a": {"num_bits": 4, "axis": None}})


def test_a_dead_channel_gets_a_scale_and_zeros_are_refused(tmp_path: Path) -> None:
    values = Extremes((0.0, -1e-44) + (-7.0,) * 30, (0.0,) * 32)
    dead: Measured = {("none", (layer, Side.KEY)): values for layer in range(2)}
    scales = static_scales(policy(fmt("int4", "per_channel"), FP16), SMALL, dead, tmp_path)
    assert scales.layers[0][Side.KEY].scale == (2.0**-126, 2.0**-126, *(1.0,) * 30)
    with pytest.raises(UserError, match=r"model\.path=.*: the values of layer 0 are all 0 on the calibration texts"):
        static_scales(policy(FP16, FP8), SMALL, {("none", (0, Side.VALUE)): Extremes((0.0,), (0.0,))}, tmp_path)


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
def test_a_policy_that_no_export_can_declare_is_explained(kv: KVPolicy, reason: str) -> None:
    for algorithms in (UNIFIED_HF_KV, TENSORRT_LLM_KV):
        assert reason in str(export_refusal(kv, algorithms))


def test_redundant_overrides_and_an_exact_cache_are_accepted() -> None:
    for kv in (policy(FP8, FP8, None, LayerOverride(layers=(0,), key=FP8)), FP16_POLICY):
        assert export_refusal(kv, UNIFIED_HF_KV) is None
    assert "the export has no name for this format" in str(export_refusal(policy(BF16, BF16), UNIFIED_HF_KV))


class Words:
    """A tokenizer with one id per word: the word's length."""

    bos_token = None

    def __call__(self, text: str, add_special_tokens: bool, truncation: bool, max_length: int) -> dict[str, list[int]]:
        assert add_special_tokens
        assert truncation
        return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_texts_are_cut_and_foreign_tokens_are_refused() -> None:
    assert tokenize(Words(), ["a bb ccc", "", "dd"], 2, 10) == [[1, 2], [2]]
    with pytest.raises(UserError, match=r"makes token 4, the model's vocab_size is 4"):
        tokenize(Words(), ["four"], 8, 4)
    with pytest.raises(UserError, match=r"calibration\.samples=1: every text is empty"):
        tokenize(Words(), [""], 8, 4)
