"""Writes ModelOpt's two official exports, where they can express the policy, and validates each of them.

An export that is not written gets its reason in the report instead.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.description import CheckpointInfo, inspect_checkpoint
from pipeline.checkpoint.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal, tensorrt_llm_refusal
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import POLICY_FILE, KVPolicy
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE, KVScales
from stages.checkpoints import load_tokenizer
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.materialize import check_weights, copy_checkpoint, source_dtype
from stages.quantize.recipe import cache_quantizers
from stages.quantize.run import dequantized_weights, quantized_model, resolve_device
from stages.quantize.tokens import tokenize
from stages.quantize.validate import (
    validate_tensorrt_llm,
    validate_unified_hf,
)

Report = dict[str, Any]
"""What `exports.json` says of one export: whether it was written, by which rule its scales were made, or why not."""


def export(
    checkpoint: Path,
    quantized: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    progress: Progress,
) -> None:
    """Export a quantized checkpoint in ModelOpt's official forms. The weights are quantized again, and must come out the same.

    `out` receives:

    - `unified_hf/`, `tensorrt_llm/`: the exports, where they can express the policy, each validated.
    - `exports.json`: by which rule their scales were made, and why an export was not written.
    - `checkpoint/`, `kv_policy.json`, `kv_scales.json`: those of the quantized checkpoint, with links to its weights.

    Args:
        checkpoint: The source checkpoint.
        quantized: What `quantize` wrote of it, with the same arguments.
        out: An empty directory.
        weights: Format of the linear layers.
        policy: Formats of the stored keys and values.
        calibration_texts: Texts to run through the model.
        max_length: Longer texts are cut to this many tokens.
        seed: Seed of torch's random numbers.
        progress: Called with a label, the steps done, and the steps in all.

    Raises:
        RuntimeError: ModelOpt quantized the weights otherwise this time, or exported something else than the policy says.
    """
    info, judged = inspect_checkpoint(checkpoint), inspect_checkpoint(quantized / "checkpoint")
    samples = tokenize(load_tokenizer(checkpoint), calibration_texts, max_length, info.vocab_size)
    scales = KVScales.model_validate_json((quantized / SCALES_FILE).read_bytes())
    made = json.loads((quantized / "quantizers.json").read_text(encoding="utf-8"))
    model = quantized_model(info, weights, samples, seed, progress, resolve_device(made["device"]))
    if weights != "none":
        check_weights(judged, dequantized_weights(model, info.shape.layers))
    adapter.add_cache_quantizers(model, cache_quantizers(policy, info.shape, scales, backend=adapter.BACKEND_AVAILABLE))
    copy_checkpoint(judged, out / "checkpoint")
    for name in (POLICY_FILE, SCALES_FILE):
        shutil.copyfile(quantized / name, out / name)
    report = export_all(model, info, out, weights=weights, policy=policy, scales=scales, progress=progress)
    (out / "exports.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def export_all(
    model: torch.nn.Module,
    info: CheckpointInfo,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    scales: KVScales,
    progress: Progress,
) -> dict[str, Report]:
    """Write `out/unified_hf` and `out/tensorrt_llm` where possible.

    Tensors that are not quantized get the checkpoint's dtype.

    Args:
        model: The quantized model. The exporters change it in place: it must not be used afterwards.
        info: The source checkpoint.
        out: Directory of the quantize stage.
        weights: Format of the linear layers.
        policy: Formats of the stored keys and values.
        scales: The static scales that the exports must carry.
        progress: Called with a label, the exports done, and the exports in all.

    Returns:
        A report for each of the two exports.

    Raises:
        ExportMismatch: An export is not what it declares, or not what the policy says.
    """
    layers, dtype = info.shape.layers, source_dtype(info)
    reports: dict[str, Report] = {}
    adapter.cast_for_export(model, dtype)

    progress("exporting", 0, 2)
    reason = export_refusal(policy, TENSORRT_LLM_KV) or tensorrt_llm_refusal(info)
    if reason:
        reports["tensorrt_llm"] = {"written": False, "reason": reason}
    else:
        target = out / "tensorrt_llm"
        adapter.export_tensorrt_llm(copy.deepcopy(model), target, dtype)
        validate_tensorrt_llm(target, policy, weights, layers, scales, scale_floor=adapter.TENSORRT_LLM_SCALE_FLOOR)
        floor = adapter.TENSORRT_LLM_SCALE_FLOOR if policy.key.dtype == "fp8_e4m3" else 0.0
        reports["tensorrt_llm"] = _written(policy, floor, shared=True)

    progress("exporting", 1, 2)
    reason = export_refusal(policy, UNIFIED_HF_KV)
    if reason:
        reports["unified_hf"] = {"written": False, "reason": reason}
    else:
        target = out / "unified_hf"
        adapter.export_unified_hf(model, target)
        validate_unified_hf(target, policy, weights, layers, scales, scale_floor=adapter.UNIFIED_HF_SCALE_FLOOR)
        # The exporter writes no tokenizer; an engine needs the whole checkpoint in one directory.
        for name in info.other_files:
            if name in TOKENIZER_FILES:
                shutil.copyfile(info.path / name, target / name)
        reports["unified_hf"] = _written(policy, adapter.UNIFIED_HF_SCALE_FLOOR, shared=False)
    progress("exporting", 2, 2)
    return reports


def _written(policy: KVPolicy, floor: float, *, shared: bool) -> Report:
    report: Report = {"written": True}
    if policy.quantized:
        report["kv_scale"] = f"max(scale, {floor:g})" if floor else "scale"
        report["kv_scale_shared_by_keys_and_values"] = shared
    return report
