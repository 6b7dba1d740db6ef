"""Builds a bundle of TensorRT-LLM from a quantized checkpoint: a TensorRT engine, or a checkpoint with LLM arguments."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.checkpoints.exports import algorithm
from stages.checkpoints.files import read_json
from stages.checkpoints.quantized import MODELOPT_FILE
from stages.checkpoints.rope import rope_at_top_level
from stages.core.errors import UserError
from stages.engines.interpreter.bundle import CHECKPOINT, copy_linking_weights
from stages.engines.interpreter.process import Interpreter, Worker, WorkerError
from stages.engines.interpreter.protocol import EmptyAnswer, Pinned
from stages.engines.trtllm import checkpoint as checkpoints
from stages.engines.trtllm import settings
from stages.engines.trtllm.config import TargetName, TrtllmConfig
from stages.policies.policy import KVPolicy

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
    ranks = read_json(checkpoint, checkpoints.CONFIG_FILE)["mapping"]["tp_size"]
    title = f"backend.python={interpreter.python}: TensorRT-LLM {interpreter.release}"
    with Worker(interpreter.program, interpreter.python, **settings.rank_environment(1)) as worker:
        arguments = settings.build_flags(flags, str(checkpoint.absolute()), str(out.absolute()), ranks)
        try:
            worker.call("build", EmptyAnswer, flags=arguments)
        except WorkerError as error:
            raise UserError(f"{title}: {error}; its last output: {worker.last_line()}") from error
    missing = [f"rank{rank}.engine" for rank in range(ranks) if not (out / f"rank{rank}.engine").is_file()]
    if missing or not (out / checkpoints.CONFIG_FILE).is_file():
        raise UserError(f"{title}: trtllm-build wrote no {', '.join(missing) or checkpoints.CONFIG_FILE}")


def _build_engine(export: Path, out: Path, config: TrtllmConfig, interpreter: Interpreter) -> dict[str, Any]:
    source = out / CHECKPOINT
    checkpoints.write_checkpoint(export, source, config.tensor_parallel_size)
    checkpoint = read_json(source, checkpoints.CONFIG_FILE)
    flags = settings.engine_settings(config, checkpoint["quantization"])
    compile_engine(source, out / ENGINE, flags, interpreter)
    expected = settings.expected_config(flags, checkpoint, interpreter.release)
    rewritten = settings.differences(expected, read_json(out / ENGINE, checkpoints.CONFIG_FILE))
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    return {
        "arguments": {**expected, **{f"build_config.{key}": value for key, value in flags.items()}},
        "evaluated_with": settings.evaluation_of_engine(config),
        "rewritten": {key: built for key, _, built in rewritten},
        "kv_scales": checkpoints.kv_scales(source),
    }


def _pin_llm_args(export: Path, out: Path, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> dict[str, Any]:
    source = out / CHECKPOINT
    quantization = {
        "quant_algo": _copy_served(export, export.with_name("checkpoint"), source),
        "kv_cache_quant_algo": algorithm(policy.key),
    }
    serving = settings.llm_args(config, policy)
    rewritten: list[settings.Difference] = []
    answers = read_llm_args(interpreter, source, serving, settings.evaluation_of_served(serving))
    for answer in answers:
        if answer.refused:
            reason = " ".join(answer.refused.split())
            raise UserError(
                f"kv={policy.name}: TensorRT-LLM {interpreter.release} refuses the checkpoint: {reason}; choose other weights, "
                "another kv, or another backend.python"
            )
        rewritten.extend(settings.differences(settings.flatten(answer.pinned), answer.arguments))
        rewritten.extend(settings.differences(quantization, answer.quantization))
    pinned, evaluated_with = (answer.pinned for answer in answers)
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    command = f"# TensorRT-LLM {interpreter.release}: trtllm-serve {CHECKPOINT} --config {LLM_ARGS_FILE}"
    (out / LLM_ARGS_FILE).write_text(f"{command}\n{OmegaConf.to_yaml(pinned)}", encoding="utf-8")
    return {
        "arguments": settings.flatten(pinned),
        "evaluated_with": evaluated_with,
        "rewritten": {key: built for key, _, built in rewritten},
        "kv_scales": [1.0] * read_json(source, checkpoints.CONFIG_FILE)["num_hidden_layers"] if policy.quantized else [],
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
        config = rope_at_top_level(read_json(plain, checkpoints.CONFIG_FILE))
        (out / checkpoints.CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return weights
