"""The validators on hand-made exports: correct exports pass, and every false statement about the cache is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, Side
from stages.policies.scales import KVScales, SideScales
from stages.quantize.validate import ExportMismatch, validate_tensorrt_llm, validate_unified_hf

FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
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
    validate_unified_hf(directory, policy, "fp8", len(scales.layers), scales)


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
    validate_tensorrt_llm(directory, FP8_POLICY, "fp8", 2, SCALES)


K0 = "model.layers.0.self_attn.k_proj.k_scale"
TRT_KV1 = "transformer.layers.1.attention.kv_cache_scaling_factor"


def test_true_exports_pass(tmp_path: Path) -> None:
    check_hf(tmp_path)
    (tmp_path / "trt").mkdir()
    check_trt(tmp_path / "trt")


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        (check_hf, lambda e: e.tensors.pop(K0), f"{K0} is missing"),
        (check_hf, lambda e: e.tensors.update({K0: scalar(float("nan"))}), r"k_scale is float32 \[nan\], calibration gave"),
        (check_hf, lambda e: e.tensors.update({K0: scalar(0.26)}), r"k_scale is .*0\.26.*, calibration gave 0\.25"),
        (check_hf, lambda e: e.tensors.update({K0: np.array([0.25], np.float16)}), "k_scale is float16"),
        (check_hf, lambda e: e.tensors.update({K0: np.array([0.25, 0.25], np.float32)}), "calibration gave 0.25"),
        (check_hf, lambda e: e.tensors.update({K0.replace(".0.", ".2."): scalar(1)}), "is unexpected for kv fp8, 2 layers"),
        (check_hf, lambda e: e.config.update(kv_cache_quant_algo=None), "kv_cache_quant_algo is None, must be 'FP8'"),
        (check_hf, lambda e: e.config.update(quant_algo="MIXED_PRECISION"), "quant_algo is 'MIXED_PRECISION', must be 'FP8'"),
        (check_hf, lambda e: e.config.update(kv_cache_scheme=None), r"config\.json: kv_cache_scheme is None for kv policy fp8"),
        (check_trt, lambda e: e.tensors.pop(TRT_KV1), f"{TRT_KV1} is missing"),
        (
            check_trt,
            lambda e: e.tensors.update({TRT_KV1: scalar(2.0)}),
            r"kv_cache_scaling_factor is .*2.*, calibration gave 4",
        ),
        (check_trt, lambda e: e.config["quantization"].update(quant_algo=None), "quant_algo is None, must be 'FP8'"),
        (check_trt, lambda e: e.config.update(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
    ],
)
def test_an_export_that_lies_is_refused(tmp_path: Path, check: Any, change: Change, message: str) -> None:
    with pytest.raises(ExportMismatch, match=message) as refusal:
        check(tmp_path, change)
    assert str(tmp_path) in str(refusal.value)


def test_scales_in_an_export_that_declares_none_are_refused(tmp_path: Path) -> None:
    none: dict[str, Any] = {"kv_cache_quant_algo": None, "kv_cache_scheme": None}
    with pytest.raises(ExportMismatch, match=r"_scale is unexpected for kv fp16"):
        check_hf(tmp_path, lambda e: e.config.update(none), FP16_POLICY, NO_SCALES)


def test_an_export_with_rubbish_is_refused(tmp_path: Path) -> None:
    check_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish!")
    with pytest.raises(ExportMismatch, match=r"not a safetensors file"):
        validate_unified_hf(tmp_path, FP8_POLICY, "fp8", 2, SCALES)
