"""Do an exported checkpoint's tensors say what its config declares, and does that equal the policy? Reads safetensors
headers and JSON only (numpy): neither torch nor ModelOpt, so it also judges checkpoints that others wrote.

ModelOpt's exporters drop or mislabel what they cannot express without an error (mixed keys and values are labelled
all-FP8, INT8 per token is claimed with no scales), so every export passes through here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pipeline.core.checkpoint import CheckpointInfo
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVScales, Side
from pipeline.core.weights import WeightsFormat
from stages.quantize.recipe import AWQ_BLOCK, LINEARS

RELATIVE_TOLERANCE = 1e-6
"""Scales are float32 on both sides; amax / 448 may be rounded in another order."""


class ExportMismatch(RuntimeError):
    """An export is not what it declares or not what was asked; names the file, the tensor and the mismatch."""


@dataclass(frozen=True)
class _Layout:
    """Where one kind of export keeps things. Templates take `layer` and `linear`."""

    algorithm: str | None
    """Declared quant_algo of the weights."""
    weight_dtype: str | None = None
    """Safetensors dtype of the packed weights; None when they stay floating point."""
    linear_scales: tuple[str, ...] = ()
    """Suffixes of scales that every linear layer must have."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """What else the config must say of the weights."""


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
    # AWQ's other factors are folded into the normalisation before the layer.
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
_KV_ALGORITHMS = {"fp8_e4m3 per_tensor": "FP8", "int8 per_tensor": "INT8"}
UNIFIED_HF_KV = ("FP8",)
TENSORRT_LLM_KV = ("FP8", "INT8")
"""The caches that each export can declare: one algorithm for keys and values, one scale a layer."""


def why_not(policy: KVPolicy, algorithms: tuple[str, ...]) -> str | None:
    """Why an export that knows these algorithms of the cache cannot carry the policy, None when it can."""
    formats = {name: _describe(form) for name, form in policy.formats}
    if policy.exact_tokens:
        return f"{policy.sink_tokens} sink and {policy.recent_tokens} recent exact tokens cannot be declared"
    if policy.window is not None:
        return f"other formats for the last {policy.window.tokens} tokens cannot be declared"
    if len(set(formats.values())) > 1:
        listed = ", ".join(f"{name} {description}" for name, description in formats.items())
        return f"{listed}: the exporters know one algorithm for all keys and values and would mislabel some"
    if policy.key.dtype == "fp16" or _KV_ALGORITHMS.get(formats["key"]) in algorithms:
        return None
    return f"{formats['key']} keys and values: the export has no name for this format and would refuse, drop or mislabel it"


def why_not_tensorrt_llm(info: CheckpointInfo) -> str | None:
    """Why TensorRT-LLM's checkpoint format, as ModelOpt writes it, would not describe this model."""
    if info.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return f"{info.architecture}: refused by ModelOpt 0.37, which TensorRT-LLM 1.2 carries; use the unified export"
    if info.rope_scaling is not None:
        return f"rope_scaling {info.rope_scaling}: ModelOpt drops it from config.json"
    return None


def _describe(form: Format) -> str:
    rotated = f" rotation={form.rotation}" if form.rotation != "none" else ""
    return f"{form.dtype} {form.granularity}{'' if form.symmetric else ' asymmetric'}{rotated}"


def validate_unified_hf(
    directory: Path,
    policy: KVPolicy,
    weights: WeightsFormat,
    layers: int,
    scales: KVScales,
    *,
    scale_floor: float = 0.0,
) -> None:
    """Check a unified Hugging Face export; ExportMismatch says what is wrong.

    scale_floor: smallest cache scale that the exporter writes (1.0 before ModelOpt 0.43).
    """
    tensors = _Tensors.open(directory, "*.safetensors")
    config_file = directory / "hf_quant_config.json"
    # An export in which nothing is quantized has no such file from 0.44 on.
    declared = _json(config_file)["quantization"] if config_file.is_file() else {}
    layout = _HF[weights]
    algorithm = _kv_algorithm(policy, UNIFIED_HF_KV)
    _check_declared(config_file, declared, algorithm, layout, f"weights {weights}, kv {policy.name}")
    embedded = _json(directory / "config.json").get("quantization_config") or {}
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
    """Check a one-rank TensorRT-LLM export; ExportMismatch says what is wrong.

    scale_floor: FP8 cache scales below it are raised to it. Keys and values share `kv_cache_scaling_factor`, which is
    the larger of the two.
    """
    tensors = _Tensors.open(directory, "rank*.safetensors")
    config_file = directory / "config.json"
    config = _json(config_file)
    if config.get("num_hidden_layers") != layers:
        raise ExportMismatch(f"{config_file}: num_hidden_layers is {config.get('num_hidden_layers')}, not {layers}")
    layout = _TENSORRT_LLM[weights]
    algorithm = _kv_algorithm(policy, TENSORRT_LLM_KV)
    declared = config.get("quantization") or {}
    _check_declared(config_file, declared, algorithm, layout, f"weights {weights}, kv {policy.name}")

    prefix = "transformer.layers.{layer}."
    scaled = _TENSORRT_LLM_LINEARS if weights in ("int8_sq", "int4_awq") else ()
    pre_quant = tuple(f"{linear}.prequant_scaling_factor" for linear in scaled)
    prefixes = [prefix.format(layer=layer) for layer in range(layers)]
    _check_weights(tensors, layout, prefixes, _TENSORRT_LLM_LINEARS, pre_quant)
    floor = scale_floor if algorithm == "FP8" else 0.0
    key, value = _side(scales, Side.KEY, floor), _side(scales, Side.VALUE, floor)
    both = None if key is None or value is None else [max(pair) for pair in zip(key, value, strict=True)]
    for tensor, expected in (("k_cache", key), ("v_cache", value), ("kv_cache", both)):
        _check_kv(tensors, policy, f"{prefix}attention.{tensor}_scaling_factor", expected, layers)


@dataclass
class _Tensors:
    """Names, dtypes and shapes of all tensors of a directory; values are read on demand."""

    directory: Path
    files: dict[str, Path] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, pattern: str) -> "_Tensors":
        found = cls(directory)
        for file in sorted(directory.glob(pattern)):
            try:
                with safe_open(file, framework="np") as source:
                    for name in source.keys():  # noqa: SIM118 (not a dict)
                        view = source.get_slice(name)
                        found.files[name] = file
                        found.dtypes[name] = view.get_dtype()
                        found.shapes[name] = tuple(view.get_shape())
            except SafetensorError as error:
                raise ExportMismatch(f"{file}: not a safetensors file ({error})") from None
        if not found.files:
            raise ExportMismatch(f"{directory}: no tensors in {pattern}")
        return found

    def require(self, name: str) -> None:
        if name not in self.files:
            raise ExportMismatch(f"{self.directory}: tensor {name} is missing")

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """Values of a scale tensor, checked to be float32, finite and positive."""
        self.require(name)
        file = self.files[name]
        if self.dtypes[name] != "F32":
            raise ExportMismatch(f"{file}: {name} is {self.dtypes[name]}, a scale must be F32")
        with safe_open(file, framework="np") as source:
            values: npt.NDArray[np.float32] = source.get_tensor(name)
        if values.size == 0 or not np.isfinite(values).all() or not (values > 0).all():
            raise ExportMismatch(f"{file}: {name} holds {values.reshape(-1)[:4]}, a scale must be finite and above 0")
        return values


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ExportMismatch(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ExportMismatch(f"{file}: must hold a JSON object")
    return content


def _kv_algorithm(policy: KVPolicy, algorithms: tuple[str, ...]) -> str | None:
    """The name under which an export declares the policy's cache; ExportMismatch when there is none."""
    reason = why_not(policy, algorithms)
    if reason is not None:
        raise ExportMismatch(
            f"kv policy {policy.name} has no official export ({reason}); any kv_cache_quant_algo would mislabel it"
        )
    return _KV_ALGORITHMS.get(_describe(policy.key))


def _side(scales: KVScales, side: Side, floor: float) -> list[float] | None:
    """The one scale of every layer, raised to `floor`; None where the side has none."""
    static = [layer[side].scale[0] for layer in scales.layers if side in layer]
    return [max(scale, floor) for scale in static] or None


def _check_declared(file: Path, declared: dict[str, Any], kv: str | None, layout: _Layout, asked: str) -> None:
    wanted: dict[str, Any] = {"kv_cache_quant_algo": kv, "quant_algo": layout.algorithm, **layout.declared}
    for key, value in wanted.items():
        if declared.get(key) != value:
            raise ExportMismatch(f"{file}: {key} is {declared.get(key)!r}, must be {value!r} for {asked}")


def _check_weights(
    tensors: _Tensors, layout: _Layout, prefixes: list[str], linears: tuple[str, ...], pre_quant: tuple[str, ...]
) -> None:
    """Every linear layer's weight has the declared dtype and all its scales, and nothing else has scales.

    prefixes: one a layer. pre_quant: names below a layer of the factors that scale activations per input channel.
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


def _check_kv(tensors: _Tensors, policy: KVPolicy, template: str, expected: list[float] | None, layers: int) -> None:
    """Exactly one scale a layer, equal to the expected one; none when `expected` is None."""
    wanted = [] if expected is None else [template.format(layer=layer) for layer in range(layers)]
    suffix = template.rpartition(".")[2]
    found = {name for name in tensors.files if name.endswith(f".{suffix}")}
    if len(wanted) != len(expected or []):
        raise ExportMismatch(f"{tensors.directory}: {len(expected or [])} {suffix} expected of {layers} layers")
    for name in wanted:
        tensors.require(name)
    extra = sorted(found - set(wanted))
    if extra:
        raise ExportMismatch(f"{tensors.files[extra[0]]}: {extra[0]} is unexpected for kv {policy.name}, {layers} layers")
    for name, value in zip(wanted, expected or [], strict=True):
        stored = tensors.scale(name)
        if stored.size != 1 or abs(float(stored.reshape(-1)[0]) - value) > RELATIVE_TOLERANCE * value:
            raise ExportMismatch(f"{tensors.files[name]}: {name} is {stored.reshape(-1)[:4]}, calibration gave {value}")
