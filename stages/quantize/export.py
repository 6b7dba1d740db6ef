"""Writes ModelOpt's two official exports with a policy's cache, if they can express it.

If an export is not written, exports.json contains the reason. ModelOpt's exporters silently drop or mislabel caches that they
cannot express, and would export the weights again for every policy. So they export the weights alone, once per model, and
kvgate adds each policy's scales in the form in which ModelOpt writes them. The files of an export may be links to another
artifact's, so they are replaced, not changed.
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint, read_config
from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, algorithm, export_refusal, tensorrt_llm_refusal
from stages.checkpoints.files import GENERATION, INDEX, TOKENIZER_FILES, read_json
from stages.checkpoints.quantized import MODELOPT_FILE, SERVED
from stages.core.files import link_or_copy_all, write_atomically
from stages.core.records import Progress
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales, write_policy
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.materialize import copy_checkpoint, source_dtype
from stages.quantize.recipe import NOTHING
from stages.quantize.run import CHECKPOINT, TENSORRT_LLM, UNIFIED_HF, export_weights, load_model

CONFIG, REASONS = "config.json", "exports.json"
Reasons = dict[str, str | None]
"""Content of `exports.json`: export -> why it was not written; None if it was."""
FP8 = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
"""Declaration in config.json of the only cache that the unified export supports."""
TENSORRT_LLM_FP8_FLOOR = 1.0
"""Smallest FP8 cache scale in a TensorRT-LLM export; ModelOpt raises smaller scales to it."""


def export(
    checkpoint: Path,
    quantized: Path,
    scales: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    ranks: int = 1,
    progress: Progress,
) -> None:
    """Export a quantized checkpoint in ModelOpt's official formats.

    `quantized` is the output of `quantize_weights` for the checkpoint and `ranks`, and `scales` is the file of static scales
    written by `scale_cache`.

    `out` receives:

    - `unified_hf/`, `tensorrt_llm/`: the exports that can express the policy.
    - `exports.json`: for each export the reason why it was not written; null if it was written.
    - `checkpoint/`, `kv_policy.json`, `kv_scales.json`: the quantized checkpoint (as links), the policy and its scales.
    """
    info, static = inspect_checkpoint(checkpoint), KVScales.model_validate_json(scales.read_bytes())
    copy_checkpoint(inspect_checkpoint(quantized / CHECKPOINT), out / CHECKPOINT)
    write_policy(out, policy, static)
    if info.quantized is not None:
        _write(out / REASONS, export_quantized(quantized / SERVED, out / UNIFIED_HF, policy))
        return
    reasons: Reasons = {
        TENSORRT_LLM: export_refusal(policy, TENSORRT_LLM_KV) or tensorrt_llm_refusal(info),
        UNIFIED_HF: export_refusal(policy, UNIFIED_HF_KV),
    }
    _write(out / REASONS, reasons)
    written = [name for name, reason in reasons.items() if not reason]
    progress("exporting", 0, 1)
    if weights == "none" and written:
        _export_plain(info, out, written, ranks)
    for name in written:
        if weights != "none":
            (out / name).mkdir()
            link_or_copy_all([file.name for file in (quantized / name).iterdir()], quantized / name, out / name)
        declare = declare_unified_hf if name == UNIFIED_HF else declare_tensorrt_llm
        declare(out / name, policy, static)
    if UNIFIED_HF in written:
        # The exporter does not write these files, and an engine needs the complete checkpoint in one directory.
        for file in (GENERATION, *TOKENIZER_FILES):
            if file in info.other_files:
                (out / UNIFIED_HF / file).unlink(missing_ok=True)
                shutil.copyfile(info.path / file, out / UNIFIED_HF / file)
    progress("exporting", 1, 1)


def _export_plain(info: CheckpointInfo, out: Path, names: list[str], ranks: int) -> None:
    model = load_model(info)
    adapter.quantize_model(model, NOTHING, None)
    adapter.cast_for_export(model, source_dtype(info))
    export_weights(model, info, "none", out, names, ranks)


def export_quantized(served: Path, out: Path, policy: KVPolicy) -> Reasons:
    """Write a checkpoint that ModelOpt has already quantized as a unified export, with the policy's cache format in its files.

    Returns the content of `exports.json`. A checkpoint that another library quantized is not written.
    """
    info = inspect_checkpoint(served)
    assert info.quantized is not None
    reason = info.quantized.other_than_modelopt or export_refusal(policy, UNIFIED_HF_KV)
    reasons = {"tensorrt_llm": f"weights in the form of {info.quantized.title}", "unified_hf": reason}
    if reason:
        return reasons
    copy_checkpoint(info, out, skip=(CONFIG, MODELOPT_FILE))
    declared = read_config(served)["quantization_config"]
    cache = {"kv_cache_quant_algo": algorithm(policy.key), "exclude_modules": declared.get("ignore") or []}
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": declared["quant_algo"], **cache}}
    config = {key: value for key, value in read_json(served, CONFIG).items() if key != "quantization_config"}
    _write(out / CONFIG, config)
    _write(out / MODELOPT_FILE, content)
    return reasons


def declare_unified_hf(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    if not policy.quantized:
        return
    producer = {"name": "modelopt", "version": version("nvidia-modelopt")}
    declared = _read(directory / MODELOPT_FILE) or {"producer": producer}
    unquantized: dict[str, Any] = {"quant_algo": None, "quantized_layers": {}}
    quantization = declared.get("quantization", unquantized) | {"kv_cache_quant_algo": algorithm(policy.key)}
    _write(directory / MODELOPT_FILE, declared | {"quantization": quantization})
    config = _read(directory / CONFIG)
    embedded = config.get("quantization_config") or {"ignore": [], "producer": producer, "quant_method": "modelopt"}
    _write(directory / CONFIG, config | {"quantization_config": embedded | FP8})
    added = {
        f"model.layers.{layer}.self_attn.{side[0]}_proj.{side[0]}_scale": torch.tensor(static.scale[0])
        for layer, sides in enumerate(scales.layers)
        for side, static in sides.items()
    }
    last_shard = max(directory.glob("*.safetensors"))
    _add_tensors(last_shard, added)
    index = _read(directory / INDEX)
    if index:
        index["weight_map"] |= dict.fromkeys(added, last_shard.name)
        _write(directory / INDEX, index)


def declare_tensorrt_llm(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    """Declare the cache in an export. Keys and values share `kv_cache_scaling_factor`, the larger of their scales."""
    if not policy.quantized:
        return
    declaration, config = {"kv_cache_quant_algo": algorithm(policy.key)}, _read(directory / CONFIG)
    _write(directory / CONFIG, config | {"quantization": config["quantization"] | declaration})
    by_layer = directory / "quant_cfg.json"
    if by_layer.exists():
        _write(by_layer, _read(by_layer) | declaration)
    floor = TENSORRT_LLM_FP8_FLOOR if algorithm(policy.key) == "FP8" else 0.0
    added: dict[str, torch.Tensor] = {}
    for layer, sides in enumerate(scales.layers):
        factors = {side[0]: max(static.scale[0], floor) for side, static in sides.items()}
        factors["kv"] = max(factors.values())
        prefix = f"transformer.layers.{layer}.attention"
        added |= {f"{prefix}.{name}_cache_scaling_factor": torch.tensor([factor]) for name, factor in factors.items()}
    for rank in directory.glob("rank*.safetensors"):
        _add_tensors(rank, added)


def _add_tensors(file: Path, added: dict[str, torch.Tensor]) -> None:
    scratch = file.with_suffix(".scratch")
    save_file(load_file(file) | added, scratch, {"format": "pt"})
    scratch.replace(file)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def _write(file: Path, content: object) -> None:
    write_atomically(file, json.dumps(content, indent=4) + "\n")
