"""Builds a bundle of TensorRT-LLM from a quantized checkpoint: a TensorRT engine, or a checkpoint with LLM arguments."""

import json
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from stages.checkpoints.description import MODELOPT_FILE
from stages.checkpoints.exports import algorithm
from stages.checkpoints.files import read_json
from stages.checkpoints.rope import rope_at_top_level
from stages.core.errors import UserError
from stages.core.records import Progress
from stages.engines.bundle import BuiltFor
from stages.engines.interpreter.bundle import CHECKPOINT, ServedBundle, begin_bundle, copy_checkpoint, end_bundle
from stages.engines.interpreter.process import Interpreter, Worker, WorkerError
from stages.engines.interpreter.protocol import EmptyAnswer
from stages.engines.trtllm import checkpoint as checkpoints
from stages.engines.trtllm import settings
from stages.engines.trtllm.backend import PROGRAM, TARGETS, rank_capabilities, rank_environment, read_llm_args
from stages.engines.trtllm.config import TrtllmConfig
from stages.policies.policy import KVPolicy

STEPS = 3
ENGINE = "engine"
"""Folder of target=engine, with config.json and rank*.engine."""
LLM_ARGS_FILE = "llm_args.yaml"
"""File of target=pytorch, for `trtllm-serve BUNDLE/checkpoint --config BUNDLE/llm_args.yaml`."""


class TrtllmBundle(ServedBundle):
    """`bundle.json` of both targets. `arguments` are the settings under TensorRT-LLM's own dotted keys."""

    target: Literal["engine", "pytorch"]
    gpus: list[str]
    """Name and driver of the building machine's GPUs, one per rank."""
    tensor_parallel_size: int
    max_input_len: int
    evaluated_with: dict[str, Any]
    """LLM arguments of an evaluation. For target=pytorch: the served arguments without overlap."""
    rewritten: dict[str, Any]
    """Settings that TensorRT-LLM changed -> the built value. `backend.allow_rewrites` allowed every change."""
    kv_scales: list[float]
    """The cache's scale per layer, shared by keys and values. For target=engine it is the larger of the two calibrated
    scales; for target=pytorch it is 1.0, because the runtime does not read the checkpoint's scales."""


def build_bundle(exports: Path, out: Path, config: TrtllmConfig, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Write a bundle of ModelOpt's exports to the empty directory `out`; stage=quantize writes the exports."""
    ranks, target = config.tensor_parallel_size, config.target
    export = exports / TARGETS[target].export
    if not export.is_dir():
        reason = json.loads((exports / "exports.json").read_text(encoding="utf-8"))[export.name]
        raise UserError(f"kv={policy.name}: ModelOpt wrote no {export.name} export, {reason}")
    progress("build", 0, STEPS)
    interpreter, info, _ = begin_bundle(PROGRAM, config, exports / "checkpoint", out, policy, scales, progress)
    if target == "engine":
        fields = _build_engine(export, out, config, interpreter)
    else:
        fields = _pin_llm_args(exports, out, config, policy, interpreter)
    progress("build", STEPS - 1, STEPS)
    capabilities = rank_capabilities(target, interpreter, ranks)
    built_for = BuiltFor(library=PROGRAM.library, version=interpreter.release, compute_capabilities=capabilities)
    end_bundle(
        out, TrtllmBundle, interpreter, info,
        built_for=built_for, target=target, tensor_parallel_size=ranks,
        gpus=[f"{device.name}, driver {device.driver or 'unknown'}" for device in interpreter.devices[:ranks]],
        max_tokens=config.max_seq_len, max_batch=config.max_batch_size, max_input_len=config.max_input_len, **fields,
    )  # fmt: skip
    progress("build", STEPS, STEPS)


def compile_engine(checkpoint: Path, out: Path, flags: settings.Settings, interpreter: Interpreter) -> None:
    """Run trtllm-build on a checkpoint. Raises UserError with TensorRT-LLM's last line of output if the build fails."""
    ranks = checkpoints.read_config(checkpoint)["mapping"]["tp_size"]
    title = f"backend.python={interpreter.python}: TensorRT-LLM {interpreter.release}"
    with Worker(PROGRAM, interpreter.python, **rank_environment(1)) as worker:
        arguments = settings.build_flags(flags, str(checkpoint.absolute()), str(out.absolute()), ranks)
        try:
            worker.call("build", EmptyAnswer, flags=arguments)
        except WorkerError as error:
            raise UserError(f"{title}: {error}; it last said: {worker.last_line()}") from error
    missing = [f"rank{rank}.engine" for rank in range(ranks) if not (out / f"rank{rank}.engine").is_file()]
    if missing or not (out / checkpoints.CONFIG_FILE).is_file():
        raise UserError(f"{title}: trtllm-build wrote no {', '.join(missing) or checkpoints.CONFIG_FILE}")


def _build_engine(export: Path, out: Path, config: TrtllmConfig, interpreter: Interpreter) -> dict[str, Any]:
    """Build a TensorRT engine and return the fields of its bundle.json."""
    source = out / CHECKPOINT
    checkpoints.write_checkpoint(export, source, config.tensor_parallel_size)
    checkpoint = checkpoints.read_config(source)
    flags = settings.engine_settings(config, checkpoint["quantization"])
    compile_engine(source, out / ENGINE, flags, interpreter)
    expected = settings.expected_config(flags, checkpoint, interpreter.release)
    rewritten = settings.differences(expected, checkpoints.read_config(out / ENGINE))
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    return {
        "arguments": {**expected, **{f"build_config.{key}": value for key, value in flags.items()}},
        "evaluated_with": settings.evaluation_of_engine(config),
        "rewritten": {key: built for key, _, built in rewritten},
        "kv_scales": checkpoints.kv_scales(source),
    }


def _pin_llm_args(exports: Path, out: Path, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> dict[str, Any]:
    """Write the served checkpoint and its LLM arguments; return the fields of its bundle.json."""
    source = out / CHECKPOINT
    quantization = {
        "quant_algo": _write_served(exports / TARGETS["pytorch"].export, exports / "checkpoint", source),
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
                "another kv, or another release as backend.python"
            )
        rewritten.extend(settings.differences(settings.flatten(answer.pinned), answer.arguments))
        rewritten.extend(settings.differences(quantization, answer.quantization))
    pinned, evaluated_with = (answer.pinned for answer in answers)
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    command = f"# TensorRT-LLM {interpreter.release}: trtllm-serve {CHECKPOINT} --config {LLM_ARGS_FILE}"
    (out / LLM_ARGS_FILE).write_text(f"{command}\n{OmegaConf.to_yaml(pinned)}", encoding="utf-8")
    checkpoint = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "arguments": settings.flatten(pinned),
        "evaluated_with": evaluated_with,
        "rewritten": {key: built for key, _, built in rewritten},
        "kv_scales": [1.0] * checkpoint["num_hidden_layers"] if policy.quantized else [],
    }


def _write_served(export: Path, plain: Path, out: Path) -> str | None:
    """Write the served checkpoint to the new directory `out`, and return the quantization algorithm of its weights.

    ModelOpt's export of 16-bit weights declares `quant_algo: null`, which TensorRT-LLM refuses. In that case the unexported
    checkpoint `plain` is served; the LLM arguments set the cache's format.
    """
    declared = export / MODELOPT_FILE
    weights: str | None = read_json(export, MODELOPT_FILE)["quantization"]["quant_algo"] if declared.is_file() else None
    source = export if weights else plain
    copy_checkpoint(sorted(path.name for path in source.iterdir()), source, out)
    if source is plain:
        config = rope_at_top_level(read_json(plain, checkpoints.CONFIG_FILE))
        (out / checkpoints.CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return weights
