"""Builds a bundle of TensorRT-LLM from a quantized checkpoint: a TensorRT engine, or a checkpoint with LLM arguments."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from stages.checkpoints.exports import algorithm
from stages.checkpoints.files import read_json
from stages.checkpoints.quantized import MODELOPT_FILE
from stages.checkpoints.rope import rope_at_top_level
from stages.core.errors import UserError
from stages.engines.interpreter.backend import CHECKPOINT, copy_linking_weights
from stages.engines.interpreter.process import Interpreter, Worker, WorkerError
from stages.engines.interpreter.protocol import EmptyAnswer, Pinned
from stages.engines.trtllm import settings
from stages.engines.trtllm.config import TargetName, TrtllmConfig
from stages.policies.policy import KVPolicy

CONFIG_FILE = "config.json"
KV_SCALE = ".kv_cache_scaling_factor"
KV_RECIPROCAL = ".kv_cache_rcp_scaling_factor"
KV_SIDES = (".k_cache_scaling_factor", ".v_cache_scaling_factor")
"""Optional separate scales. TensorRT-LLM uses the larger one for both sides, and computes a missing reciprocal from the scale
(tensorrt_llm/models/modeling_utils.py, preprocess_weights)."""

EXPORTS: dict[TargetName, str] = {"engine": "tensorrt_llm", "pytorch": "unified_hf"}
ENGINE = "engine"
"""Folder of target=engine, with config.json and rank*.engine."""
LLM_ARGS_FILE = "llm_args.yaml"
"""File of target=pytorch, for `trtllm-serve BUNDLE/checkpoint --config BUNDLE/llm_args.yaml`."""


def write_served(exports: Path, out: Path, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> dict[str, Any]:
    """Write the served files of ModelOpt's exports to `out`, and return the settings for bundle.json."""
    export = exports / EXPORTS[config.target]
    if not export.is_dir():
        reason = read_json(exports, "exports.json")[export.name]
        raise UserError(f"kv={policy.name}: ModelOpt wrote no {export.name} export: {reason}")
    if config.target == "engine":
        return _build_engine(export, out, config, interpreter)
    return _pin_llm_args(export, out, config, policy, interpreter)


def read_llm_args(interpreter: Interpreter, model: Path, *arguments: settings.Settings) -> list[Pinned]:
    """Return each set of LLM arguments as the release reads it. Raises UserError if the release refuses a set."""
    with Worker(interpreter.program, interpreter.python, **settings.rank_environment(1)) as worker:
        try:
            return [worker.call("validate", Pinned, model=str(model.absolute()), llm_args=setting) for setting in arguments]
        except WorkerError as error:
            raise UserError(
                f"backend.serving: TensorRT-LLM {interpreter.release} refuses these LLM arguments: {error}; change them or set "
                "another backend.python"
            ) from error


def compile_engine(checkpoint: Path, out: Path, flags: settings.Settings, interpreter: Interpreter) -> None:
    """Run trtllm-build on a checkpoint. Raises UserError with TensorRT-LLM's last line of output if the build fails."""
    ranks = read_json(checkpoint, CONFIG_FILE)["mapping"]["tp_size"]
    title = f"backend.python={interpreter.python}: TensorRT-LLM {interpreter.release}"
    with Worker(interpreter.program, interpreter.python, **settings.rank_environment(1)) as worker:
        arguments = settings.build_flags(flags, str(checkpoint.absolute()), str(out.absolute()), ranks)
        try:
            worker.call("build", EmptyAnswer, flags=arguments)
        except WorkerError as error:
            raise UserError(f"{title}: {error}; its last output: {worker.last_line()}") from error
    missing = [f"rank{rank}.engine" for rank in range(ranks) if not (out / f"rank{rank}.engine").is_file()]
    if missing or not (out / CONFIG_FILE).is_file():
        raise UserError(f"{title}: trtllm-build wrote no {', '.join(missing) or CONFIG_FILE}")


def _build_engine(export: Path, out: Path, config: TrtllmConfig, interpreter: Interpreter) -> dict[str, Any]:
    source = out / CHECKPOINT
    copy_linking_weights(sorted(path.name for path in export.iterdir()), export, source)
    checkpoint = read_json(source, CONFIG_FILE)
    flags = settings.engine_settings(config, checkpoint["quantization"])
    compile_engine(source, out / ENGINE, flags, interpreter)
    expected = settings.expected_config(flags, checkpoint, interpreter.release)
    settings.refuse_changes(settings.differences(expected, read_json(out / ENGINE, CONFIG_FILE)), interpreter)
    return {
        "arguments": {**expected, **{f"build_config.{key}": value for key, value in flags.items()}},
        "evaluated_with": settings.evaluation_of_engine(config),
        "kv_scales": kv_scales(source),
    }


def _pin_llm_args(export: Path, out: Path, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> dict[str, Any]:
    source = out / CHECKPOINT
    quantization = {
        "quant_algo": _copy_served(export, export.with_name("checkpoint"), source),
        "kv_cache_quant_algo": algorithm(policy.key),
    }
    serving = settings.llm_args(config, policy)
    answers = read_llm_args(interpreter, source, serving, settings.evaluation_of_served(serving))
    for answer in answers:
        if answer.refused:
            reason = " ".join(answer.refused.split())
            raise UserError(
                f"kv={policy.name}: TensorRT-LLM {interpreter.release} refuses the checkpoint: {reason}; choose other weights, "
                "another kv, or another backend.python"
            )
        changes = settings.differences(settings.flatten(answer.pinned), answer.arguments)
        settings.refuse_changes(changes + settings.differences(quantization, answer.quantization), interpreter)
    pinned, evaluated_with = (answer.pinned for answer in answers)
    command = f"# TensorRT-LLM {interpreter.release}: trtllm-serve {CHECKPOINT} --config {LLM_ARGS_FILE}"
    (out / LLM_ARGS_FILE).write_text(f"{command}\n{OmegaConf.to_yaml(pinned)}", encoding="utf-8")
    return {
        "arguments": settings.flatten(pinned),
        "evaluated_with": evaluated_with,
        "kv_scales": [1.0] * read_json(source, CONFIG_FILE)["num_hidden_layers"] if policy.quantized else [],
    }


def _copy_served(export: Path, plain: Path, out: Path) -> str | None:
    """Write the served checkpoint to the new directory `out`; return the quantization algorithm of its weights.

    ModelOpt's export of 16-bit weights declares `quant_algo: null`, which TensorRT-LLM refuses. In that case the unexported
    checkpoint `plain` is served; the LLM arguments set the cache's format.
    """
    declared = export / MODELOPT_FILE
    weights: str | None = read_json(export, MODELOPT_FILE)["quantization"]["quant_algo"] if declared.is_file() else None
    source = export if weights else plain
    copy_linking_weights(sorted(path.name for path in source.iterdir()), source, out)
    if source is plain:
        config = rope_at_top_level(read_json(plain, CONFIG_FILE))
        (out / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return weights


def kv_scales(checkpoint: Path) -> list[float]:
    """Return the cache's scale per layer, shared by keys and values; empty if the cache is not quantized."""
    tensors = load_file(checkpoint / "rank0.safetensors")
    scales = {name: tensor.item() for name, tensor in tensors.items() if name.endswith(KV_SCALE)}
    return [scales[name] for name in sorted(scales, key=lambda name: int(name.split(".")[2]))]


def write_faulted(source: Path, out: Path, factor: float) -> None:
    """Write a copy of the checkpoint to the new directory `out`, with the cache's scales multiplied by `factor`.

    TensorRT-LLM multiplies new keys and values by the reciprocal, which stays correct, so only reading is wrong, not the codes.
    The file must contain the reciprocal. Otherwise TensorRT-LLM derives it from the wrong scale, and FP8 loses no precision if
    writing and reading use the same wrong scale.
    """
    out.mkdir()
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
            continue
        tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(KV_SIDES)}
        for name in [name for name in tensors if name.endswith(KV_SCALE)]:
            scale = tensors[name].item()
            tensors[name] = torch.tensor([scale * factor])
            tensors[name.replace(KV_SCALE, KV_RECIPROCAL)] = torch.tensor([1.0 / scale])
        save_file(tensors, out / path.name)
