"""Writes and validates ModelOpt's two official exports, if they can express the policy.

If an export is not written, exports.json contains the reason.
"""

import copy
import json
import shutil
from pathlib import Path

import torch

from stages.checkpoints.description import inspect_checkpoint, read_config
from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, algorithm, export_refusal, tensorrt_llm_refusal
from stages.checkpoints.files import GENERATION, TOKENIZER_FILES, read_json
from stages.checkpoints.loading import load_tokenizer
from stages.checkpoints.quantized import MODELOPT_FILE, SERVED
from stages.core.errors import MissingRequirement
from stages.core.records import Progress
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales, write_policy
from stages.quantize import modelopt_adapter as adapter
from stages.quantize import validate
from stages.quantize.calibration import tokenize
from stages.quantize.materialize import copy_checkpoint, require_same_weights, source_dtype
from stages.quantize.recipe import cache_quantizers
from stages.quantize.run import DEVICE_FILE, calibration_device, dequantized_weights, quantized_model


def export(
    checkpoint: Path,
    quantized: Path,
    scales: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    ranks: int = 1,
    progress: Progress,
) -> None:
    """Export a quantized checkpoint in ModelOpt's official formats.

    The weights are quantized again and must equal the first result. `quantized` is the output of `quantize_weights` for the
    checkpoint, and `scales` is the file of static scales written by `scale_cache`.

    `out` receives:

    - `unified_hf/`, `tensorrt_llm/`: the exports that can express the policy, each validated. The second is split over `ranks`
      GPUs, after the same export for one was validated.
    - `exports.json`: for each export the reason why it was not written; null if it was written.
    - `checkpoint/`, `kv_policy.json`, `kv_scales.json`: the quantized checkpoint (as links), the policy and its scales.
    """
    info, judged = inspect_checkpoint(checkpoint), inspect_checkpoint(quantized / "checkpoint")
    static = KVScales.model_validate_json(scales.read_bytes())
    copy_checkpoint(judged, out / "checkpoint")
    write_policy(out, policy, static)
    if info.quantized is not None:
        _write_reasons(out, export_quantized(quantized / SERVED, out / "unified_hf", policy))
        return
    reasons: Reasons = {
        "tensorrt_llm": export_refusal(policy, TENSORRT_LLM_KV) or tensorrt_llm_refusal(info),
        "unified_hf": export_refusal(policy, UNIFIED_HF_KV),
    }
    _write_reasons(out, reasons)
    if all(reasons.values()):
        return
    samples = tokenize(load_tokenizer(checkpoint), calibration_texts, max_length, info.vocab_size)
    model = quantized_model(info, weights, samples, seed, progress, recorded_device(quantized))
    if weights != "none":
        require_same_weights(judged, dequantized_weights(model, info.shape.layers))
    adapter.add_cache_quantizers(model, cache_quantizers(policy, static))
    adapter.cast_for_export(model, source_dtype(info))
    progress("exporting", 0, 2)
    if not reasons["tensorrt_llm"]:
        adapter.export_tensorrt_llm(copy.deepcopy(model), out / "tensorrt_llm", source_dtype(info))
        validate.validate_tensorrt_llm(out / "tensorrt_llm", policy, weights, static)
        if ranks > 1:
            adapter.export_tensorrt_llm(copy.deepcopy(model), out / "tensorrt_llm", source_dtype(info), ranks)
    progress("exporting", 1, 2)
    if not reasons["unified_hf"]:  # must be last: the exporter changes the model in place
        adapter.export_unified_hf(model, out / "unified_hf")
        validate.validate_unified_hf(out / "unified_hf", policy, weights, static)
        # The exporter does not write these files, and an engine needs the complete checkpoint in one directory.
        for name in (GENERATION, *TOKENIZER_FILES):
            if name in info.other_files:
                shutil.copyfile(info.path / name, out / "unified_hf" / name)
    progress("exporting", 2, 2)


def recorded_device(quantized: Path) -> torch.device:
    """Return the device that quantized the weights. Another device would round differently.

    Raises MissingRequirement if it was a GPU, and torch finds no GPU here.
    """
    recorded = torch.device(json.loads((quantized / DEVICE_FILE).read_text(encoding="utf-8")))
    if recorded.type != "cpu" and calibration_device().type == "cpu":
        raise MissingRequirement(
            "the weights were quantized on a GPU, and torch finds no GPU here; export on a machine with one"
        )
    return recorded


Reasons = dict[str, str | None]
"""Content of `exports.json`: export -> why it was not written; None if it was."""


def _write_reasons(out: Path, reasons: Reasons) -> None:
    (out / "exports.json").write_text(json.dumps(reasons, indent=1) + "\n", encoding="utf-8")


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
    copy_checkpoint(info, out, skip=("config.json", MODELOPT_FILE))
    declared = read_config(served)["quantization_config"]
    cache = {"kv_cache_quant_algo": algorithm(policy.key), "exclude_modules": declared.get("ignore") or []}
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": declared["quant_algo"], **cache}}
    config = {key: value for key, value in read_json(served, "config.json").items() if key != "quantization_config"}
    for name, written in (("config.json", config), (MODELOPT_FILE, content)):
        (out / name).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return reasons
