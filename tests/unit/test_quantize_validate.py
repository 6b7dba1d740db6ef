"""The validators against hand-made exports: right ones pass, each lie is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.checkpoint.families import LINEARS
from pipeline.core.formats import Format, WeightsFormat
from pipeline.core.kv import FP16_POLICY, KVPolicy, Side
from pipeline.core.scales import KVScales, SideScales
from stages.quantize.validate import ExportMismatch, validate_tensorrt_llm, validate_unified_hf

LAYERS = 2
FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
INT4 = Format(dtype="int4", granularity="per_group", group_size=64, scale="dynamic")
FP8_POLICY = KVPolicy(name="fp8", key=FP8, value=FP8)
MIXED_POLICY = KVPolicy(name="fp8k_int4v", key=FP8, value=INT4)


def layers_of(key: tuple[float, ...], value: tuple[float, ...]) -> KVScales:
    pairs = zip(key, value, strict=True)
    return KVScales(layers=tuple({Side.KEY: SideScales(scale=(k,)), Side.VALUE: SideScales(scale=(v,))} for k, v in pairs))


SCALES = layers_of((0.25, 2.0), (0.5, 4.0))
NO_SCALES = KVScales(layers=({}, {}))
TRT_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")

Tensors = dict[str, Any]


class Export(NamedTuple):
    """What a test may change before it is written: the tensors, and the config that declares them."""

    tensors: Tensors
    config: dict[str, Any]


Change = Callable[[Export], object]


def scalar(value: float) -> Any:
    return np.array([value], np.float32)


def unified_hf(directory: Path, change: Change | None = None) -> Path:
    """An FP8 weights + FP8 cache export, changed by `change`."""
    tensors: Tensors = {"lm_head.weight": np.zeros((4, 4), np.float16)}
    for layer in range(LAYERS):
        for linear in LINEARS:
            base = f"model.layers.{layer}.{linear}"
            tensors[f"{base}.weight"] = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
            tensors[f"{base}.weight_scale"] = scalar(0.1)
            tensors[f"{base}.input_scale"] = scalar(0.1)
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = scalar((0.25, 2.0)[layer])
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = scalar((0.5, 4.0)[layer])
    declared: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    if change:
        change(Export(tensors, declared))
    _save(tensors, directory / "model.safetensors")
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}} if declared["kv_cache_quant_algo"] else {}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    (directory / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return directory


def tensorrt_llm(directory: Path, change: Change | None = None) -> Path:
    """An FP8 weights + FP8 cache export of one rank, changed by `change`."""
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for linear in TRT_LINEARS:
            base = f"transformer.layers.{layer}.{linear}"
            tensors[f"{base}.weight"] = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
            tensors[f"{base}.weights_scaling_factor"] = scalar(0.1)
            tensors[f"{base}.activation_scaling_factor"] = scalar(0.1)
        attention = f"transformer.layers.{layer}.attention"
        tensors[f"{attention}.k_cache_scaling_factor"] = scalar((1.0, 2.0)[layer])
        tensors[f"{attention}.v_cache_scaling_factor"] = scalar((1.0, 4.0)[layer])
        tensors[f"{attention}.kv_cache_scaling_factor"] = scalar((1.0, 4.0)[layer])
    config: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    if change:
        change(Export(tensors, config))
    _save(tensors, directory / "rank0.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _save(tensors: Tensors, file: Path) -> None:
    """safetensors' numpy writer knows no float8: write them as bytes and correct the header."""
    plain = {k: v.view(np.uint8) if v.dtype == ml_dtypes.float8_e4m3fn else v for k, v in tensors.items()}
    save_file(plain, file)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for name, array in tensors.items():
        if array.dtype == ml_dtypes.float8_e4m3fn:
            header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def check_hf(directory: Path, policy: KVPolicy = FP8_POLICY, weights: WeightsFormat = "fp8", **options: Any) -> None:
    validate_unified_hf(directory, policy, weights, options.get("layers", LAYERS), options.get("scales", SCALES))


def check_trt(directory: Path, policy: KVPolicy = FP8_POLICY, weights: WeightsFormat = "fp8", **options: Any) -> None:
    validate_tensorrt_llm(directory, policy, weights, options.get("layers", LAYERS), options.get("scales", SCALES))


K0 = "model.layers.0.self_attn.k_proj.k_scale"
TRT_KV1 = "transformer.layers.1.attention.kv_cache_scaling_factor"


def drop_kv_scales(export: Export) -> None:
    for name in [n for n in export.tensors if n.endswith(("k_scale", "v_scale", "_cache_scaling_factor"))]:
        del export.tensors[name]


def test_true_exports_pass(tmp_path: Path) -> None:
    check_hf(unified_hf(tmp_path))
    (tmp_path / "trt").mkdir()
    check_trt(tensorrt_llm(tmp_path / "trt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_kv_scales, f"{K0} is missing"),
        (lambda e: e.tensors.update({K0: scalar(float("nan"))}), "k_scale holds .*nan.*finite and above 0"),
        (lambda e: e.tensors.update({K0: scalar(-0.25)}), "finite and above 0"),
        (lambda e: e.tensors.update({K0: scalar(0.26)}), r"k_scale is .*0\.26.*, calibration gave 0\.25"),
        (lambda e: e.tensors.update({K0: np.array([0.25], np.float16)}), "k_scale is F16, a scale must be F32"),
        (lambda e: e.tensors.update({K0: np.array([0.25, 0.25], np.float32)}), "calibration gave 0.25"),
        (lambda e: e.config.update(kv_cache_quant_algo=None), "kv_cache_quant_algo is None, must be 'FP8'"),
        (lambda e: e.config.update(quant_algo="MIXED_PRECISION"), "quant_algo is 'MIXED_PRECISION', must be 'FP8'"),
        (
            lambda e: e.tensors.pop("model.layers.1.mlp.up_proj.weight_scale"),
            "layers.1.mlp.up_proj.weight_scale is missing",
        ),
        (lambda e: e.tensors.pop("model.layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
        (
            lambda e: e.tensors.update({"model.layers.0.mlp.up_proj.weight": np.zeros((4, 4), np.float16)}),
            "mlp.up_proj.weight is F16, quant_algo FP8 needs F8_E4M3",
        ),
        (
            lambda e: e.tensors.update({"model.embed_tokens.weight_scale": scalar(1.0)}),
            "model.embed_tokens.weight_scale is a scale that quant_algo does not account for",
        ),
    ],
)
def test_a_unified_hf_export_that_lies_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ExportMismatch, match=message) as refusal:
        check_hf(unified_hf(tmp_path, change))
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_kv_scales, "layers.0.attention.k_cache_scaling_factor is missing"),
        (
            lambda e: e.tensors.update({TRT_KV1: scalar(2.0)}),
            r"kv_cache_scaling_factor is .*2.*, calibration gave 4\.0",
        ),
        (lambda e: e.config["quantization"].update(quant_algo=None), "quant_algo is None, must be 'FP8'"),
        (lambda e: e.config.update(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
        (
            lambda e: e.tensors.pop("transformer.layers.1.mlp.fc.activation_scaling_factor"),
            "layers.1.mlp.fc.activation_scaling_factor is missing",
        ),
    ],
)
def test_a_tensorrt_llm_export_that_lies_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ExportMismatch, match=message):
        check_trt(tensorrt_llm(tmp_path, change))


def test_an_all_fp8_label_for_mixed_keys_and_values_is_refused(tmp_path: Path) -> None:
    scales = KVScales(layers=tuple({Side.KEY: layer[Side.KEY]} for layer in SCALES.layers))
    (tmp_path / "trt").mkdir()
    refusal = r"fp8k_int4v has no official export \(key fp8_e4m3 per_tensor, value int4 per_group"
    with pytest.raises(ExportMismatch, match=refusal):
        check_hf(unified_hf(tmp_path), MIXED_POLICY, scales=scales)
    with pytest.raises(ExportMismatch, match=refusal):
        check_trt(tensorrt_llm(tmp_path / "trt"), MIXED_POLICY, scales=scales)


def test_a_layer_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    unified_hf(tmp_path)
    with pytest.raises(ExportMismatch, match=r"layers.2.self_attn.q_proj.weight is missing"):
        check_hf(tmp_path, layers=3, scales=layers_of((0.25, 2.0, 1.0), (0.5, 4.0, 1.0)))
    with pytest.raises(ExportMismatch, match=r"layers\.1\..* is a scale that quant_algo does not account for"):
        check_hf(tmp_path, layers=1, scales=layers_of((0.25,), (0.5,)))


def test_scales_in_an_export_that_declares_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportMismatch, match=r"k_scale is unexpected for kv fp16"):
        check_hf(unified_hf(tmp_path, lambda e: e.config.update(kv_cache_quant_algo=None)), FP16_POLICY, scales=NO_SCALES)


def test_config_json_must_declare_the_cache_too(tmp_path: Path) -> None:
    unified_hf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportMismatch, match=r"config\.json: kv_cache_scheme is None for kv policy fp8"):
        check_hf(tmp_path)


def test_an_export_without_tensors_or_with_rubbish_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportMismatch, match=r"no tensors"):
        check_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish!")
    with pytest.raises(ExportMismatch, match=r"not a safetensors file"):
        check_hf(tmp_path)
