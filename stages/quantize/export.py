"""Writes ModelOpt's two official exports, where they can express the policy, and validates each of them.

An export that is not written gets its reason in the report instead.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from pipeline.core.checkpoint import TOKENIZER_FILES, CheckpointInfo
from pipeline.core.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal, tensorrt_llm_refusal
from pipeline.core.kv import KVPolicy, KVScales
from pipeline.core.records import Progress
from pipeline.core.weights import WeightsFormat
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.materialize import source_dtype
from stages.quantize.validate import (
    validate_tensorrt_llm,
    validate_unified_hf,
)

Report = dict[str, Any]
"""What `quantizers.json` says of one export: whether it was written, by which rule its scales were made, or why not."""


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
