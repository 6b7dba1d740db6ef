"""Validates an exported checkpoint: its tensors must hold what its config declares, and both must equal the policy.

ModelOpt's exporters drop or mislabel what they cannot express, without an error: mixed keys and values are labelled
all-FP8, INT8 per token is claimed with no scales. Every export is therefore validated. Neither torch nor ModelOpt is
needed, so that this module also judges checkpoints that others wrote.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pipeline.checkpoint.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, algorithm, export_refusal
from pipeline.checkpoint.families import LINEARS
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.scales import KVScales
from stages.quantize.recipe import AWQ_BLOCK

RELATIVE_TOLERANCE = 1e-6
"""Allowed difference of scales. They are float32 on both sides, but amax / 448 may be rounded in another order."""
TENSORRT_LLM_FP8_FLOOR = 1.0
"""Smallest FP8 cache scale of the TensorRT-LLM export, which raises smaller ones."""


class ExportMismatch(RuntimeError):
    """An export is not what it declares, or not what the policy says; names the file, the tensor and the mismatch."""


@dataclass(frozen=True)
class Layout:
    """How one kind of export stores and declares one weights format."""

    algorithm: str | None = None
    """Declared quant_algo of the weights."""
    weight_dtype: str | None = None
    """Safetensors dtype of the packed weights; None when they stay floating point."""
    linear_scales: tuple[str, ...] = ()
    """Suffixes of the scales that every linear layer must have."""
    pre_quant: tuple[str, ...] = ()
    """Names, below a layer's prefix, of the factors that scale activations per input channel."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the config that describe the weights, with their values."""


@dataclass(frozen=True)
class ExportKind:
    """One of ModelOpt's official exports."""

    files: str
    """Glob of the files that hold tensors."""
    prefix: str
    """Of a layer's tensors."""
    linears: tuple[str, ...]
    algorithms: tuple[str, ...]
    """Of caches, those that it can declare."""
    layouts: Mapping[WeightsFormat, Layout]


_AWQ = {"group_size": AWQ_BLOCK, "has_zero_point": False, "pre_quant_scale": True}
_HF_SCALES = ("weight_scale", "input_scale")
_HF_SMOOTHED = tuple(f"{linear}.pre_quant_scale" for linear in LINEARS)
# AWQ folds its other factors into the normalisation before the layer.
_HF_AWQ = ("self_attn.o_proj.pre_quant_scale", "mlp.down_proj.pre_quant_scale")
UNIFIED_HF = ExportKind(
    files="*.safetensors",
    prefix="model.layers.{}.",
    linears=LINEARS,
    algorithms=UNIFIED_HF_KV,
    layouts={
        "none": Layout(),
        "fp8": Layout("FP8", "F8_E4M3", _HF_SCALES),
        "int8_sq": Layout("W8A8_SQ_PER_CHANNEL", "I8", _HF_SCALES, _HF_SMOOTHED),
        "int4_awq": Layout("W4A16_AWQ", "U8", _HF_SCALES[:1], _HF_AWQ, _AWQ),
    },
)
_TENSORRT_LLM_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
_TENSORRT_LLM_SCALES = ("weights_scaling_factor", "activation_scaling_factor")
_TENSORRT_LLM_SMOOTHED = tuple(f"{linear}.prequant_scaling_factor" for linear in _TENSORRT_LLM_LINEARS)
TENSORRT_LLM = ExportKind(
    files="rank*.safetensors",
    prefix="transformer.layers.{}.",
    linears=_TENSORRT_LLM_LINEARS,
    algorithms=TENSORRT_LLM_KV,
    layouts={
        "none": Layout(),
        "fp8": Layout("FP8", "F8_E4M3", _TENSORRT_LLM_SCALES),
        "int8_sq": Layout("W8A8_SQ_PER_CHANNEL", "I8", _TENSORRT_LLM_SCALES, _TENSORRT_LLM_SMOOTHED),
        "int4_awq": Layout("W4A16_AWQ", "I8", _TENSORRT_LLM_SCALES[:1], _TENSORRT_LLM_SMOOTHED, _AWQ),
    },
)
_SCALES = (*_HF_SCALES, "pre_quant_scale", *_TENSORRT_LLM_SCALES, "prequant_scaling_factor")
_FLOATS = ("F16", "BF16", "F32")


def validate_unified_hf(directory: Path, policy: KVPolicy, weights: WeightsFormat, layers: int, scales: KVScales) -> None:
    """Check a unified Hugging Face export."""
    tensors = _Tensors(directory, UNIFIED_HF.files)
    file = directory / "hf_quant_config.json"
    # An export in which nothing is quantized has no such file.
    declared = _read_json(file)["quantization"] if file.is_file() else {}
    cache = {
        "self_attn.k_proj.k_scale": _static(scales, Side.KEY),
        "self_attn.v_proj.v_scale": _static(scales, Side.VALUE),
    }
    _validate(UNIFIED_HF, tensors, file, declared, policy, weights, layers, cache)
    scheme = (_read_json(directory / "config.json").get("quantization_config") or {}).get("kv_cache_scheme")
    if (scheme is None) != (_kv_algorithm(policy, UNIFIED_HF) is None):
        raise ExportMismatch(f"{directory / 'config.json'}: kv_cache_scheme is {scheme} for kv policy {policy.name}")


def validate_tensorrt_llm(directory: Path, policy: KVPolicy, weights: WeightsFormat, layers: int, scales: KVScales) -> None:
    """Check a TensorRT-LLM export of one rank; arguments and errors are those of `validate_unified_hf`.

    Keys and values share `kv_cache_scaling_factor`, which is the larger scale of the two.
    """
    file = directory / "config.json"
    config = _read_json(file)
    if config.get("num_hidden_layers") != layers:
        raise ExportMismatch(f"{file}: num_hidden_layers is {config.get('num_hidden_layers')}, not {layers}")
    floor = TENSORRT_LLM_FP8_FLOOR if _kv_algorithm(policy, TENSORRT_LLM) == "FP8" else 0.0
    key, value = ([max(scale, floor) for scale in _static(scales, side)] for side in (Side.KEY, Side.VALUE))
    shared = [max(pair) for pair in zip(key, value, strict=True)]
    cache = {
        f"attention.{name}_scaling_factor": expected
        for name, expected in (("k_cache", key), ("v_cache", value), ("kv_cache", shared))
    }
    tensors = _Tensors(directory, TENSORRT_LLM.files)
    _validate(TENSORRT_LLM, tensors, file, config.get("quantization") or {}, policy, weights, layers, cache)


def _validate(
    kind: ExportKind,
    tensors: "_Tensors",
    file: Path,
    declared: Mapping[str, Any],
    policy: KVPolicy,
    weights: WeightsFormat,
    layers: int,
    cache: Mapping[str, list[float]],
) -> None:
    """Check what `file` declares, the weights, and the cache's scales, which are listed by name below a layer's prefix."""
    layout = kind.layouts[weights]
    needed = {"kv_cache_quant_algo": _kv_algorithm(policy, kind), "quant_algo": layout.algorithm, **layout.declared}
    for key, value in needed.items():
        if declared.get(key) != value:
            subject = f"weights {weights}, kv {policy.name}"
            raise ExportMismatch(f"{file}: {key} is {declared.get(key)!r}, must be {value!r} for {subject}")
    prefixes = [kind.prefix.format(layer) for layer in range(layers)]
    _check_weights(tensors, layout, prefixes, kind.linears)
    for name, expected in cache.items():
        _check_cache(tensors, policy, prefixes, name, expected)


class _Tensors:
    """Names, files and dtypes of a directory's tensors; values of scales are read on demand, by numpy alone."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self.directory = directory
        self.files: dict[str, Path] = {}
        self.dtypes: dict[str, str] = {}
        for file in sorted(directory.glob(pattern)):
            try:
                with safe_open(file, framework="np") as source:
                    for name in source.keys():  # noqa: SIM118 (not a dict)
                        self.files[name], self.dtypes[name] = file, source.get_slice(name).get_dtype()
            except SafetensorError as error:
                raise ExportMismatch(f"{file}: not a safetensors file ({error})") from None
        if not self.files:
            raise ExportMismatch(f"{directory}: no tensors in {pattern}")

    def require(self, name: str) -> None:
        """Raise ExportMismatch unless there is a tensor `name`."""
        if name not in self.files:
            raise ExportMismatch(f"{self.directory}: tensor {name} is missing")

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values of a scale tensor; ExportMismatch unless they are float32, finite and positive."""
        self.require(name)
        file = self.files[name]
        if self.dtypes[name] != "F32":
            raise ExportMismatch(f"{file}: {name} is {self.dtypes[name]}, a scale must be F32")
        with safe_open(file, framework="np") as source:
            values: npt.NDArray[np.float32] = source.get_tensor(name)
        if values.size == 0 or not np.isfinite(values).all() or not (values > 0).all():
            raise ExportMismatch(f"{file}: {name} holds {values.reshape(-1)[:4]}, a scale must be finite and above 0")
        return values


def _check_weights(tensors: _Tensors, layout: Layout, prefixes: list[str], linears: tuple[str, ...]) -> None:
    """Check that every linear layer's weight has the declared dtype and all its scales, and that nothing else has scales."""
    scales = {prefix + name for prefix in prefixes for name in layout.pre_quant}
    for name in sorted(scales):
        tensors.require(name)
    for base in (prefix + linear for prefix in prefixes for linear in linears):
        name = f"{base}.weight"
        tensors.require(name)
        dtype = tensors.dtypes[name]
        if dtype != layout.weight_dtype and not (layout.weight_dtype is None and dtype in _FLOATS):
            needed = layout.weight_dtype or "floating point"
            raise ExportMismatch(f"{tensors.files[name]}: {name} is {dtype}, quant_algo {layout.algorithm} needs {needed}")
        for suffix in layout.linear_scales:
            tensors.scale(f"{base}.{suffix}")
            scales.add(f"{base}.{suffix}")
    extra = sorted({name for name in tensors.files if name.rpartition(".")[2] in _SCALES} - scales)
    if extra:
        raise ExportMismatch(f"{tensors.files[extra[0]]}: {extra[0]} is a scale that quant_algo does not account for")


def _check_cache(tensors: _Tensors, policy: KVPolicy, prefixes: list[str], name: str, expected: list[float]) -> None:
    """Check that each layer has exactly one scale, equal to the expected one; no layer has any when none is expected."""
    if expected and len(expected) != len(prefixes):
        raise ExportMismatch(f"{tensors.directory}: {len(expected)} {name} expected of {len(prefixes)} layers")
    names = [prefix + name for prefix in prefixes] if expected else []
    for full in names:
        tensors.require(full)
    extra = sorted({full for full in tensors.files if full.endswith(f".{name.rpartition('.')[2]}")} - set(names))
    if extra:
        raise ExportMismatch(
            f"{tensors.files[extra[0]]}: {extra[0]} is unexpected for kv {policy.name}, {len(prefixes)} layers"
        )
    for full, value in zip(names, expected, strict=True):
        stored = tensors.scale(full).reshape(-1)
        if stored.size != 1 or abs(float(stored[0]) - value) > RELATIVE_TOLERANCE * value:
            raise ExportMismatch(f"{tensors.files[full]}: {full} is {stored[:4]}, calibration gave {value}")


def _static(scales: KVScales, side: Side) -> list[float]:
    """Return the scale of every layer's side; nothing where the side has no static scale."""
    return [layer[side].scale[0] for layer in scales.layers if side in layer]


def _kv_algorithm(policy: KVPolicy, kind: ExportKind) -> str | None:
    """Return the name under which an export declares the policy's cache; ExportMismatch when there is none."""
    reason = export_refusal(policy, kind.algorithms)
    if reason is not None:
        raise ExportMismatch(
            f"kv policy {policy.name} has no official export ({reason}); any kv_cache_quant_algo would mislabel it"
        )
    return algorithm(policy.key)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ExportMismatch(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ExportMismatch(f"{file}: must hold a JSON object")
    return content
