"""Recipes, static scales and texts; validators that refuse every false statement of an export."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.engines.random_llama import BF16, FP8, FP16, fmt
from safetensors.numpy import save_file

from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal
from stages.core.errors import UserError
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Side, Window
from stages.policies.scales import KVScales, SideScales
from stages.quantize.calibration import tokenize
from stages.quantize.recipe import check_enabled
from stages.quantize.scales import Extremes, Measured, static_scales
from stages.quantize.validate import ExportMismatch, validate_tensorrt_llm, validate_unified_hf

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


FP8_POLICY = KVPolicy(name="fp8", key=FP8, value=FP8)
PAIRS = ((0.25, 0.5), (2.0, 4.0))
"""Scales of keys and values, by layer."""
SCALES = KVScales(layers=tuple({Side.KEY: SideScales(scale=(k,)), Side.VALUE: SideScales(scale=(v,))} for k, v in PAIRS))
NO_SCALES = KVScales(layers=({}, {}))


class Export(NamedTuple):
    """The parts of an export that a test may change before writing: the tensors, and the config that declares them."""

    tensors: dict[str, Any]
    config: dict[str, Any]


Change = Callable[[Export], object]


def scalar(value: float) -> Any:
    return np.array([value], np.float32)


def check_hf(
    directory: Path, change: Change = lambda _: None, policy: KVPolicy = FP8_POLICY, scales: KVScales = SCALES
) -> None:
    """Validate an FP8 weights + FP8 cache export, changed by `change`."""
    tensors = {"lm_head.weight": np.zeros((4, 4), np.float16)}
    for layer, pair in enumerate(PAIRS):
        for side, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = scalar(scale)
    scheme = {"num_bits": 8, "type": "float"}
    export = Export(tensors, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "kv_cache_scheme": scheme})
    change(export)
    save_file(export.tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(
        json.dumps({"quantization_config": {"kv_cache_scheme": export.config.pop("kv_cache_scheme")}})
    )
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": export.config}))
    validate_unified_hf(directory, policy, "fp8", scales)


def check_trt(directory: Path, change: Change = lambda _: None) -> None:
    """Validate an FP8 weights + FP8 cache export of one rank, changed by `change`."""
    tensors: dict[str, Any] = {}
    for layer, (key, value) in enumerate(((1.0, 1.0), (2.0, 4.0))):
        for name, scale in (("k", key), ("v", value), ("kv", value)):
            tensors[f"transformer.layers.{layer}.attention.{name}_cache_scaling_factor"] = scalar(scale)
    export = Export(tensors, {"num_hidden_layers": 2, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    change(export)
    save_file(export.tensors, directory / "rank0.safetensors")
    (directory / "config.json").write_text(json.dumps(export.config))
    validate_tensorrt_llm(directory, FP8_POLICY, "fp8", SCALES)


K0 = "model.layers.0.self_attn.k_proj.k_scale"
TRT_KV1 = "transformer.layers.1.attention.kv_cache_scaling_factor"


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        (check_hf, lambda _: None, ""),
        (check_trt, lambda _: None, ""),
        (check_hf, lambda e: e.tensors.pop(K0), rf"{K0} is .* \[\], calibration gave 0\.25"),
        (check_hf, lambda e: e.tensors.update({K0: np.array(0.26, np.float32)}), r"k_scale is .*0\.26.*, calibration gave 0"),
        (check_hf, lambda e: e.tensors.update({K0: np.array([0.25], np.float16)}), "k_scale is float16"),
        (check_hf, lambda e: e.tensors.update({K0: np.array([0.25, 0.25], np.float32)}), "calibration gave 0.25"),
        (check_hf, lambda e: e.tensors.update({K0.replace(".0.", ".2."): scalar(1)}), "calibration gave nan"),
        (check_hf, lambda e: e.config.update(kv_cache_quant_algo=None), "kv_cache_quant_algo is None, must be 'FP8'"),
        (check_hf, lambda e: e.config.update(quant_algo="MIXED_PRECISION"), "quant_algo is 'MIXED_PRECISION', must be 'FP8'"),
        (check_hf, lambda e: e.config.update(kv_cache_scheme=None), r"config\.json: kv_cache_scheme is None for kv policy fp8"),
        (check_trt, lambda e: e.tensors.update({TRT_KV1: scalar(2.0)}), rf"{TRT_KV1} is .*2.*, calibration gave 4"),
        (check_trt, lambda e: e.config.update(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
    ],
)
def test_an_export_with_a_false_declaration_is_refused(tmp_path: Path, check: Any, change: Change, message: str) -> None:
    with pytest.raises(ExportMismatch, match=f"^{tmp_path}.*{message}") if message else nullcontext():
        check(tmp_path, change)


def test_scales_in_an_export_that_declares_none_are_refused(tmp_path: Path) -> None:
    none: dict[str, Any] = {"kv_cache_quant_algo": None, "kv_cache_scheme": None}
    with pytest.raises(ExportMismatch, match=r"_scale is .*, calibration gave nan"):
        check_hf(tmp_path, lambda e: e.config.update(none), FP16_POLICY, NO_SCALES)
