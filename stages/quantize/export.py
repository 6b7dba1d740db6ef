"""Writes ModelOpt's two official exports with a policy's cache, if they can express it.

If an export is not written, exports.json contains the reason.
"""

import json
import shutil
from pathlib import Path

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint, read_config
from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, algorithm, export_refusal, tensorrt_llm_refusal
from stages.checkpoints.files import GENERATION, TOKENIZER_FILES, read_json
from stages.checkpoints.quantized import MODELOPT_FILE, SERVED
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales, write_policy
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.cache_format import declare_tensorrt_llm, declare_unified_hf
from stages.quantize.materialize import copy_checkpoint, source_dtype
from stages.quantize.recipe import NOTHING
from stages.quantize.run import CHECKPOINT, TENSORRT_LLM, UNIFIED_HF, export_weights, load_model


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
        _write_reasons(out, export_quantized(quantized / SERVED, out / UNIFIED_HF, policy))
        return
    reasons: Reasons = {
        TENSORRT_LLM: export_refusal(policy, TENSORRT_LLM_KV) or tensorrt_llm_refusal(info),
        UNIFIED_HF: export_refusal(policy, UNIFIED_HF_KV),
    }
    _write_reasons(out, reasons)
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
