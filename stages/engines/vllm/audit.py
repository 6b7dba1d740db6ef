"""Compares the scales in a checkpoint with the scales that vLLM 0.32 and 0.33 would use. Only scale tensors are loaded.

Source: vLLM's model_executor/layers/quantization. base_config.py and fp8.py define the tensor names that vLLM reads;
kv_cache.py and compressed_tensors.py define the values that vLLM uses. vLLM silently skips any other name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.checkpoints.carried_scales import SIDES_OF, scale_tensors, scales_by_layer
from stages.checkpoints.files import INDEX, indexed_files, read_json, refusal
from stages.checkpoints.intake.shapes import ModelShape, read_model
from stages.engines.backend import Audit
from stages.policies.delivery import LayerDelivery, Scales
from stages.policies.policy import Side

AUDITED_RELEASES = ("0.32", "0.33")
"""Releases that follow the rules below; tests/contract/facts/vllm.json records the digests of vLLM's functions."""
READ_NAMES = re.compile(
    r"self_attn\.(?:(?:attn|[kv]_proj|qkv_proj|qkqkv_proj)\.)?[kv]_scale|self_attn\.[kv]_cache\.scale|self_attn\.kv_scale"
)
"""Names within a layer that vLLM reads with every quantization method."""
OUTPUT = re.compile(r"self_attn\.[kv]_proj\.output_scale")
"""Additional names that vLLM reads if the weights are quantized with `fp8` or `quark`."""
SEPARATE, PAIRED = ("compressed-tensors",), ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "fp8", "quark")
"""Quantization methods, grouped by how vLLM replaces a missing scale.

SEPARATE: vLLM uses 1.0. PAIRED: vLLM uses the key scale for a missing value scale, fails if only the key scale is missing, and
uses 1.0 if both are missing.
"""


def audit(path: Path) -> Audit:
    """Return each layer's scales twice: as the checkpoint contains them, and as vLLM would use them.

    Raises:
        UserError: The checkpoint cannot be read.
    """
    if not path.is_dir():
        raise refusal(path, "is not a directory; give a Hugging Face checkpoint, which vLLM loads")
    model = read_model(path)
    method, scheme, refused = _read_declaration(path)
    tensors = list(scale_tensors(path))
    loaded: list[Scales] = [{} for _ in range(model.kv.layers)]
    problems = list(refused)
    indexed = indexed_files(path) if (path / INDEX).is_file() else None
    for tensor in tensors:
        if tensor.layer >= model.kv.layers:
            problems.append(f"{tensor.name}: the model has {model.kv.layers} layers")
        elif indexed is not None and tensor.file not in indexed:
            problems.append(f"{tensor.name}: is in {tensor.file}, which {INDEX} does not name")
        elif READ_NAMES.fullmatch(tensor.within) or (method in ("fp8", "quark") and OUTPUT.fullmatch(tensor.within)):
            loaded[tensor.layer][SIDES_OF[tensor.letter][0]] = tensor.values  # vLLM reads a shared scale as the keys' scale
        else:
            problems.append(f"{tensor.name}: vLLM does not read this name")
    carried = scales_by_layer(tensors, model.kv.layers)
    used_scales = [_used_scales(number, scales, method, scheme, model, problems) for number, scales in enumerate(loaded)]
    layers = [LayerDelivery(carried=stored, used=loaded) for stored, loaded in zip(carried, used_scales, strict=True)]
    return Audit(f"vLLM {' and '.join(AUDITED_RELEASES)}, {method or 'no quantization declared'}", layers, problems)


def _read_declaration(path: Path) -> tuple[str, Mapping[str, Any], list[str]]:
    """Return a checkpoint's quantization method, its `kv_cache_scheme`, and the reasons why vLLM refuses it."""
    config = read_json(path, "config.json")
    declared = config.get("quantization_config")
    if declared is None and (path / "hf_quant_config.json").is_file():
        declared = read_json(path, "hf_quant_config.json")
    if declared is None and isinstance(config.get("text_config"), dict):
        declared = config["text_config"].get("quantization_config")
    declared = declared or config.get("compression_config") or {}
    if not isinstance(declared, dict):
        raise refusal(path, "quantization_config must be an object; give the config.json that belongs to the weights")
    inner = declared.get("quantization", declared)
    method = str(declared.get("quant_method") or ("modelopt" if "quantization" in declared else "")).lower()
    scheme = declared.get("kv_cache_scheme")
    scheme = scheme if isinstance(scheme, dict) else {}
    if method.startswith("modelopt") and not (isinstance(inner, dict) and inner.get("quant_algo")):
        return method, scheme, ["quant_algo is missing, so vLLM refuses the checkpoint"]
    if method in SEPARATE and scheme:
        accepted = {"type": ("float",), "num_bits": (8,), "strategy": ("tensor", "attn_head"), "symmetric": (True,)}
        problems = [
            f"kv_cache_scheme.{key}={scheme.get(key)}, which vLLM refuses"
            for key, values in accepted.items()
            if scheme.get(key) not in values
        ]
        return method, scheme, problems
    return method, scheme, []


def _used_scales(
    layer: int, scales: Scales, method: str, scheme: Mapping[str, Any], model: ModelShape, problems: list[str]
) -> Scales:
    """Return the scales that vLLM would use for a layer. Scales that make vLLM fail are appended to `problems`."""
    count = model.kv.kv_heads if method in SEPARATE and scheme.get("strategy") == "attn_head" else 1
    default = (1.0,) * count
    for side, values in scales.items():
        if method in (*SEPARATE, *PAIRED) and len(values) != count:
            problems.append(f"layer {layer} {side}s: {len(values)} scales instead of {count}, which vLLM refuses")
            return {Side.KEY: default, Side.VALUE: default}
    if method in SEPARATE:
        return {side: scales.get(side, default) for side in (Side.KEY, Side.VALUE)}
    if method not in PAIRED or not scales:
        return {Side.KEY: default, Side.VALUE: default}
    key, value = (scales.get(side, (-1.0,)) for side in (Side.KEY, Side.VALUE))
    if key[0] > 0 and value[0] > 0:
        return {Side.KEY: key, Side.VALUE: value}
    if not key[0] > 0 and not (key[0] < 0 and value[0] < 0):
        problems.append(f"layer {layer}: vLLM fails on a key scale that is not above 0 with a value scale of {value[0]:.4g}")
        return {Side.KEY: default, Side.VALUE: default}
    shared = max(key, value) if key[0] > 0 else default
    return {Side.KEY: shared, Side.VALUE: shared}
