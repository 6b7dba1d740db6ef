"""Validates an exported checkpoint: its declared cache format and its scales must match the policy.

ModelOpt's exporters silently drop or mislabel formats that they cannot express: mixed keys and values are labelled all-FP8, and
INT8 per token is declared without scales. Every export is therefore validated, without using torch or ModelOpt.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from stages.checkpoints.exports import algorithm
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales

TOLERANCE = 1e-6
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


def validate_unified_hf(directory: Path, policy: KVPolicy, weights: WeightsFormat, scales: KVScales) -> None:
    """Check a unified Hugging Face export. Raises ExportMismatch."""
    file = directory / "hf_quant_config.json"
    # An unquantized export does not have this file.
    declared = json.loads(file.read_bytes())["quantization"] if file.is_file() else {}
    scheme = (json.loads((directory / "config.json").read_bytes()).get("quantization_config") or {}).get("kv_cache_scheme")
    if (scheme is not None) != policy.quantized:
        raise ExportMismatch(f"{directory / 'config.json'}: kv_cache_scheme is {scheme} for kv policy {policy.name}")
    expected = {
        f"model.layers.{layer}.self_attn.{side[0]}_proj.{side[0]}_scale": static.scale[0]
        for layer, sides in enumerate(scales.layers)
        for side, static in sides.items()
    }
    _check(file, declared, expected, policy, weights)


def validate_tensorrt_llm(directory: Path, policy: KVPolicy, weights: WeightsFormat, scales: KVScales) -> None:
    """Check a TensorRT-LLM export of one rank, with the arguments and errors of `validate_unified_hf`.

    Keys and values share `kv_cache_scaling_factor`, the larger one of their two scales.
    """
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    if config.get("num_hidden_layers") != len(scales.layers):
        raise ExportMismatch(f"{file}: num_hidden_layers is {config.get('num_hidden_layers')}, not {len(scales.layers)}")
    floor = TENSORRT_LLM_FP8_FLOOR if algorithm(policy.key) == "FP8" else 0.0
    expected: dict[str, float] = {}
    for layer, sides in enumerate(scales.layers):
        factors = {side[0]: max(static.scale[0], floor) for side, static in sides.items()}
        factors |= {"kv": max(factors.values())} if factors else {}
        prefix = f"transformer.layers.{layer}.attention"
        expected |= {f"{prefix}.{name}_cache_scaling_factor": factor for name, factor in factors.items()}
    _check(file, config.get("quantization") or {}, expected, policy, weights)


def _check(
    file: Path, declared: Mapping[str, Any], expected: Mapping[str, float], policy: KVPolicy, weights: WeightsFormat
) -> None:
    """Check the algorithms that `file` declares, and that the export has exactly the `expected` scales of the cache."""
    for key, value in {"kv_cache_quant_algo": algorithm(policy.key), "quant_algo": ALGORITHMS[weights]}.items():
        if declared.get(key) != value:
            subject = f"weights {weights}, kv {policy.name}"
            raise ExportMismatch(f"{file}: {key} is {declared.get(key)!r}, must be {value!r} for {subject}")
    shards = list(file.parent.glob("*.safetensors"))
    if not shards:
        raise ExportMismatch(f"{file.parent}: has no safetensors")
    stored: dict[str, npt.NDArray[np.generic]] = {}
    for shard in shards:
        with safe_open(shard, framework="np") as source:
            names = [name for name in source.keys() if name.endswith(CACHE_SCALES)]  # noqa: SIM118 (not a dict)
            stored |= {name: source.get_tensor(name).reshape(-1) for name in names}
    for name in sorted(expected.keys() | stored.keys()):
        numbers, scale = stored.get(name, np.empty(0)), expected.get(name, math.nan)
        if numbers.dtype != np.float32 or numbers.size != 1 or not math.isclose(numbers.item(), scale, rel_tol=TOLERANCE):
            raise ExportMismatch(f"{file.parent}: {name} is {numbers.dtype} {numbers[:4]}, calibration gave {scale}")
