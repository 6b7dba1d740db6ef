"""Validates an exported checkpoint: its declared cache format and its scales must match the policy.

ModelOpt's exporters silently drop or mislabel formats that they cannot express: mixed keys and values are labelled all-FP8, and
INT8 per token is declared without scales. Every export is therefore validated, without using torch or ModelOpt.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from stages.checkpoints.exports import algorithm
from stages.policies.formats import WeightsFormat
from stages.policies.policy import SIDES, KVPolicy, Side
from stages.policies.scales import KVScales

RELATIVE_TOLERANCE = 1e-6
"""Allowed relative difference of scales. Both are float32, but amax / 448 may be rounded in another order."""
TENSORRT_LLM_FP8_FLOOR = 1.0
"""Smallest FP8 cache scale in a TensorRT-LLM export; the exporter raises smaller scales to it."""
ALGORITHMS: dict[WeightsFormat, str | None] = {
    "none": None,
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
}
"""The quant_algo that both exports declare for weights."""
CACHE_SCALES = (".k_scale", ".v_scale", "_cache_scaling_factor")
"""Suffixes of the names of the cache's scales."""


class ExportMismatch(RuntimeError):
    """An export contradicts its own declaration or the policy. The message names the file, the tensor and the mismatch."""


def validate_unified_hf(directory: Path, policy: KVPolicy, weights: WeightsFormat, layers: int, scales: KVScales) -> None:
    """Check a unified Hugging Face export. Raises ExportMismatch."""
    file = directory / "hf_quant_config.json"
    # An unquantized export does not have this file.
    _check_declared(file, json.loads(file.read_bytes())["quantization"] if file.is_file() else {}, policy, weights)
    scheme = (json.loads((directory / "config.json").read_bytes()).get("quantization_config") or {}).get("kv_cache_scheme")
    if (scheme is not None) != policy.quantized:
        raise ExportMismatch(f"{directory / 'config.json'}: kv_cache_scheme is {scheme} for kv policy {policy.name}")
    cache = {"self_attn.k_proj.k_scale": _static(scales, Side.KEY), "self_attn.v_proj.v_scale": _static(scales, Side.VALUE)}
    _check_cache(directory, policy, layers, "model.layers.{}.", cache)


def validate_tensorrt_llm(directory: Path, policy: KVPolicy, weights: WeightsFormat, layers: int, scales: KVScales) -> None:
    """Check a TensorRT-LLM export of one rank, with the arguments and errors of `validate_unified_hf`.

    Keys and values share `kv_cache_scaling_factor`, the larger one of their two scales.
    """
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    if config.get("num_hidden_layers") != layers:
        raise ExportMismatch(f"{file}: num_hidden_layers is {config.get('num_hidden_layers')}, not {layers}")
    _check_declared(file, config.get("quantization") or {}, policy, weights)
    floor = TENSORRT_LLM_FP8_FLOOR if algorithm(policy.key) == "FP8" else 0.0
    key, value = ([max(scale, floor) for scale in _static(scales, side)] for side in SIDES)
    shared = [max(pair) for pair in zip(key, value, strict=True)]
    cache = {f"attention.{name}_cache_scaling_factor": factor for name, factor in (("k", key), ("v", value), ("kv", shared))}
    _check_cache(directory, policy, layers, "transformer.layers.{}.", cache)


def _check_declared(file: Path, declared: Mapping[str, Any], policy: KVPolicy, weights: WeightsFormat) -> None:
    for key, value in {"kv_cache_quant_algo": algorithm(policy.key), "quant_algo": ALGORITHMS[weights]}.items():
        if declared.get(key) != value:
            subject = f"weights {weights}, kv {policy.name}"
            raise ExportMismatch(f"{file}: {key} is {declared.get(key)!r}, must be {value!r} for {subject}")


def _check_cache(directory: Path, policy: KVPolicy, layers: int, prefix: str, cache: Mapping[str, list[float]]) -> None:
    """Check that each layer has exactly the scales of `cache` (name below the layer's prefix -> scale per layer)."""
    expected = {
        prefix.format(layer) + name: value
        for name, values in cache.items()
        if values
        for layer, value in zip(range(layers), values, strict=True)
    }
    scales = _scales(directory)
    for name in expected.keys() - scales.keys():
        raise ExportMismatch(f"{directory}: tensor {name} is missing")
    for name in scales.keys() - expected.keys():
        raise ExportMismatch(f"{directory}: {name} is unexpected for kv {policy.name}, {layers} layers")
    for name, value in expected.items():
        stored = scales[name].reshape(-1)
        same = stored.dtype == np.float32 and stored.size == 1 and abs(float(stored[0]) - value) <= RELATIVE_TOLERANCE * value
        if not same:
            raise ExportMismatch(f"{directory}: {name} is {stored.dtype} {stored[:4]}, calibration gave {value}")


def _scales(directory: Path) -> dict[str, npt.NDArray[np.generic]]:
    scales: dict[str, npt.NDArray[np.generic]] = {}
    files = list(directory.glob("*.safetensors"))
    if not files:
        raise ExportMismatch(f"{directory}: has no safetensors")
    for file in files:
        with safe_open(file, framework="np") as source:
            names = [name for name in source.keys() if name.endswith(CACHE_SCALES)]  # noqa: SIM118 (not a dict)
            scales |= {name: source.get_tensor(name) for name in names}
    return scales


def _static(scales: KVScales, side: Side) -> list[float]:
    return [layer[side].scale[0] for layer in scales.layers if side in layer]
