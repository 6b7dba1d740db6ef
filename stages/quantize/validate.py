"""Validates an exported checkpoint: its tensors must hold what its config declares, and both must equal the policy.

ModelOpt's exporters drop or mislabel what they cannot express, without an error: mixed keys and values are labelled
all-FP8, INT8 per token is claimed with no scales. Every export is therefore validated. Neither torch nor ModelOpt is
needed, so that this module also judges checkpoints that others wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoint.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, algorithm, export_refusal
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.scales import KVScales
from stages.quantize.export_tensors import ExportMismatch, ExportTensors, read_json
from stages.quantize.recipe import AWQ_BLOCK, LINEARS

RELATIVE_TOLERANCE = 1e-6
"""Allowed difference of scales. They are float32 on both sides, but amax / 448 may be rounded in another order."""


@dataclass(frozen=True)
class _Layout:
    """How one kind of export stores and declares one weights format."""

    algorithm: str | None
    """Declared quant_algo of the weights."""
    weight_dtype: str | None = None
    """Safetensors dtype of the packed weights; None when they stay floating point."""
    linear_scales: tuple[str, ...] = ()
    """Suffixes of the scales that every linear layer must have."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the config that describe the weights, with their values."""


_AWQ = {"group_size": AWQ_BLOCK, "has_zero_point": False, "pre_quant_scale": True}
_HF: dict[WeightsFormat, _Layout] = {
    "none": _Layout(None),
    "fp8": _Layout("FP8", "F8_E4M3", ("weight_scale", "input_scale")),
    "int8_sq": _Layout("W8A8_SQ_PER_CHANNEL", "I8", ("weight_scale", "input_scale")),
    "int4_awq": _Layout("W4A16_AWQ", "U8", ("weight_scale",), _AWQ),
}
_TENSORRT_LLM: dict[WeightsFormat, _Layout] = {
    "none": _Layout(None),
    "fp8": _Layout("FP8", "F8_E4M3", ("weights_scaling_factor", "activation_scaling_factor")),
    "int8_sq": _Layout("W8A8_SQ_PER_CHANNEL", "I8", ("weights_scaling_factor", "activation_scaling_factor")),
    "int4_awq": _Layout("W4A16_AWQ", "I8", ("weights_scaling_factor",), _AWQ),
}
_TENSORRT_LLM_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
_HF_PRE_QUANT: dict[WeightsFormat, tuple[str, ...]] = {
    "int8_sq": LINEARS,
    # AWQ folds its other factors into the normalisation before the layer.
    "int4_awq": ("self_attn.o_proj", "mlp.down_proj"),
}
_SCALE_SUFFIXES = (
    ".weight_scale",
    ".input_scale",
    ".pre_quant_scale",
    ".weights_scaling_factor",
    ".activation_scaling_factor",
    ".prequant_scaling_factor",
)
_FLOATS = ("F16", "BF16", "F32")


def validate_unified_hf(
    directory: Path,
    policy: KVPolicy,
    weights: WeightsFormat,
    layers: int,
    scales: KVScales,
    *,
    scale_floor: float = 0.0,
) -> None:
    """Check a unified Hugging Face export.

    Args:
        directory: The export.
        policy: Formats of the stored keys and values.
        weights: Format of the linear layers.
        layers: Decoder layers of the model.
        scales: The calibrated scales.
        scale_floor: Smallest cache scale that the exporter writes (1.0 before ModelOpt 0.43).

    Raises:
        ExportMismatch: The export differs from its declaration or from the policy.
    """
    tensors = ExportTensors.open(directory, "*.safetensors")
    config_file = directory / "hf_quant_config.json"
    # An export in which nothing is quantized has no such file from 0.44 on.
    declared = read_json(config_file)["quantization"] if config_file.is_file() else {}
    layout = _HF[weights]
    algorithm = _kv_algorithm(policy, UNIFIED_HF_KV)
    _check_declared(config_file, declared, algorithm, layout, f"weights {weights}, kv {policy.name}")
    embedded = read_json(directory / "config.json").get("quantization_config") or {}
    if (embedded.get("kv_cache_scheme") is None) != (algorithm is None):
        scheme = embedded.get("kv_cache_scheme")
        raise ExportMismatch(f"{directory / 'config.json'}: kv_cache_scheme is {scheme} for kv policy {policy.name}")

    prefix = "model.layers.{layer}."
    pre_quant = tuple(f"{linear}.pre_quant_scale" for linear in _HF_PRE_QUANT.get(weights, ()))
    _check_weights(tensors, layout, [prefix.format(layer=layer) for layer in range(layers)], LINEARS, pre_quant)
    _check_kv(tensors, policy, prefix + "self_attn.k_proj.k_scale", _side(scales, Side.KEY, scale_floor), layers)
    _check_kv(tensors, policy, prefix + "self_attn.v_proj.v_scale", _side(scales, Side.VALUE, scale_floor), layers)


def validate_tensorrt_llm(
    directory: Path,
    policy: KVPolicy,
    weights: WeightsFormat,
    layers: int,
    scales: KVScales,
    *,
    scale_floor: float = 1.0,
) -> None:
    """Check a TensorRT-LLM export of one rank.

    Keys and values share `kv_cache_scaling_factor`, which is the larger scale of the two.

    Args:
        directory: The export.
        policy: Formats of the stored keys and values.
        weights: Format of the linear layers.
        layers: Decoder layers of the model.
        scales: The calibrated scales.
        scale_floor: Smallest FP8 cache scale that the exporter writes; it raises smaller ones.

    Raises:
        ExportMismatch: The export differs from its declaration or from the policy.
    """
    tensors = ExportTensors.open(directory, "rank*.safetensors")
    config_file = directory / "config.json"
    config = read_json(config_file)
    if config.get("num_hidden_layers") != layers:
        raise ExportMismatch(f"{config_file}: num_hidden_layers is {config.get('num_hidden_layers')}, not {layers}")
    layout = _TENSORRT_LLM[weights]
    algorithm = _kv_algorithm(policy, TENSORRT_LLM_KV)
    declared = config.get("quantization") or {}
    _check_declared(config_file, declared, algorithm, layout, f"weights {weights}, kv {policy.name}")

    prefix = "transformer.layers.{layer}."
    smoothed = _TENSORRT_LLM_LINEARS if weights in ("int8_sq", "int4_awq") else ()
    pre_quant = tuple(f"{linear}.prequant_scaling_factor" for linear in smoothed)
    prefixes = [prefix.format(layer=layer) for layer in range(layers)]
    _check_weights(tensors, layout, prefixes, _TENSORRT_LLM_LINEARS, pre_quant)
    floor = scale_floor if algorithm == "FP8" else 0.0
    key, value = _side(scales, Side.KEY, floor), _side(scales, Side.VALUE, floor)
    shared = None if key is None or value is None else [max(pair) for pair in zip(key, value, strict=True)]
    for tensor, expected in (("k_cache", key), ("v_cache", value), ("kv_cache", shared)):
        _check_kv(tensors, policy, f"{prefix}attention.{tensor}_scaling_factor", expected, layers)


def _side(scales: KVScales, side: Side, floor: float) -> list[float] | None:
    """Return the scale of every layer's side, raised to `floor`; None where the side has no static scale."""
    static = [layer[side].scale[0] for layer in scales.layers if side in layer]
    return [max(scale, floor) for scale in static] or None


def _check_declared(file: Path, declared: dict[str, Any], kv: str | None, layout: _Layout, subject: str) -> None:
    """Check the config's quantization section; errors end with `subject`, the weights format and the policy."""
    expected: dict[str, Any] = {"kv_cache_quant_algo": kv, "quant_algo": layout.algorithm, **layout.declared}
    for key, value in expected.items():
        if declared.get(key) != value:
            raise ExportMismatch(f"{file}: {key} is {declared.get(key)!r}, must be {value!r} for {subject}")


def _check_weights(
    tensors: ExportTensors, layout: _Layout, prefixes: list[str], linears: tuple[str, ...], pre_quant: tuple[str, ...]
) -> None:
    """Check that every linear layer's weight has the declared dtype and all its scales, and that nothing else has scales.

    Args:
        tensors: The export's tensors.
        layout: How the export stores the weights format.
        prefixes: The prefix of each layer's tensor names.
        linears: Names of the linear layers below a prefix.
        pre_quant: Names, below a prefix, of the factors that scale activations per input channel.
    """
    scales = {prefix + name for prefix in prefixes for name in pre_quant}
    for name in sorted(scales):
        tensors.require(name)
    for base in (prefix + linear for prefix in prefixes for linear in linears):
        tensors.require(f"{base}.weight")
        dtype = tensors.dtypes[f"{base}.weight"]
        if dtype != layout.weight_dtype and not (layout.weight_dtype is None and dtype in _FLOATS):
            raise ExportMismatch(
                f"{tensors.files[f'{base}.weight']}: {base}.weight is {dtype}, "
                f"quant_algo {layout.algorithm} needs {layout.weight_dtype or 'floating point'}"
            )
        for suffix in layout.linear_scales:
            tensors.scale(f"{base}.{suffix}")
            scales.add(f"{base}.{suffix}")
    extra = sorted({name for name in tensors.files if name.endswith(_SCALE_SUFFIXES)} - scales)
    if extra:
        raise ExportMismatch(f"{tensors.files[extra[0]]}: {extra[0]} is a scale that quant_algo does not account for")


def _check_kv(tensors: ExportTensors, policy: KVPolicy, template: str, expected: list[float] | None, layers: int) -> None:
    """Check that each layer has exactly one scale, equal to the expected one; no layer has any when `expected` is None."""
    names = [] if expected is None else [template.format(layer=layer) for layer in range(layers)]
    suffix = template.rpartition(".")[2]
    stored_names = {name for name in tensors.files if name.endswith(f".{suffix}")}
    if len(names) != len(expected or []):
        raise ExportMismatch(f"{tensors.directory}: {len(expected or [])} {suffix} expected of {layers} layers")
    for name in names:
        tensors.require(name)
    extra = sorted(stored_names - set(names))
    if extra:
        raise ExportMismatch(f"{tensors.files[extra[0]]}: {extra[0]} is unexpected for kv {policy.name}, {layers} layers")
    for name, value in zip(names, expected or [], strict=True):
        stored = tensors.scale(name)
        if stored.size != 1 or abs(float(stored.reshape(-1)[0]) - value) > RELATIVE_TOLERANCE * value:
            raise ExportMismatch(f"{tensors.files[name]}: {name} is {stored.reshape(-1)[:4]}, calibration gave {value}")


def _kv_algorithm(policy: KVPolicy, algorithms: tuple[str, ...]) -> str | None:
    """Return the name under which an export declares the policy's cache; ExportMismatch when there is none."""
    reason = export_refusal(policy, algorithms)
    if reason is not None:
        raise ExportMismatch(
            f"kv policy {policy.name} has no official export ({reason}); any kv_cache_quant_algo would mislabel it"
        )
    return algorithm(policy.key)
