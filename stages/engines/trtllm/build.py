"""Builds a bundle of TensorRT-LLM from a quantized checkpoint: a TensorRT engine, or a checkpoint with LLM arguments."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.files import link_or_copy
from pipeline.checkpoint.description import CheckpointInfo, inspect_checkpoint
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, KVPolicy
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE
from stages.engines.bundle import BuiltFor, read_scales, write_bundle, write_policy
from stages.engines.interpreter.process import WorkerError
from stages.engines.interpreter.protocol import EmptyAnswer
from stages.engines.trtllm import checkpoint as checkpoints
from stages.engines.trtllm import settings
from stages.engines.trtllm.bundle import BACKEND, CHECKPOINT, ENGINE, LIBRARY, LLM_ARGS_FILE, TrtllmBundle
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.interpreter import Interpreter, Worker, files_below, probe
from stages.engines.trtllm.protocol import ValidatedArguments
from stages.engines.trtllm.targets import TARGETS, TargetName, resolve

STEPS = 3
CACHE_DTYPES = {"FP8": "fp8", "INT8": "int8"}


def build_bundle(
    exports: Path,
    out: Path,
    *,
    policy: KVPolicy,
    scales: Path,
    progress: Progress,
    release: str,
    compute_capabilities: list[str],
    **options: object,
) -> None:
    """Write a bundle.

    Args:
        exports: ModelOpt's exports, with the quantized checkpoint, as stage=quantize writes them.
        out: An empty directory.
        policy: How the cache is stored.
        scales: The policy's static scales, a kv_scales.json.
        progress: Called with the steps that are done.
        release: The interpreter's release of TensorRT-LLM.
        compute_capabilities: Those of the GPUs that an engine is built for.
        options: The backend's build_parts, with a target that is not `auto`.

    Raises:
        UserError: The policy has no export for the target, TensorRT-LLM failed, or it built something else.
        MissingRequirement: TensorRT-LLM is not installed.
    """
    config = TrtllmConfig.model_validate({**options, "name": BACKEND, "request_timeout_s": 1})
    interpreter, target = probe(config.python), cast(TargetName, config.target)
    assert (interpreter.release, target) == (release, resolve(target, interpreter)), (
        "the interpreter changed since it was probed"
    )
    if interpreter.unread is not None:
        progress(interpreter.unread, 0, 0)
    export = exports / TARGETS[target].export
    if not export.is_dir():
        raise UserError(f"kv={policy.name}: ModelOpt wrote no {export.name} export, {_missing_export(exports, export.name)}")
    info = inspect_checkpoint(exports / "checkpoint")
    write_policy(out, policy, read_scales(scales, policy, info.shape))
    for name in TOKENIZER_FILES:
        if (exports / "checkpoint" / name).is_file():
            shutil.copyfile(exports / "checkpoint" / name, out / name)
    progress("build", 0, STEPS)
    fill = _build_engine if target == "engine" else _pin_llm_args
    fields = fill(export, out, config, policy, interpreter)
    progress("build", STEPS - 1, STEPS)
    names = files_below(out, (POLICY_FILE, SCALES_FILE, f"{ENGINE}/*", f"{CHECKPOINT}/*", LLM_ARGS_FILE))
    files = {name: file_digest(out / name) for name in names}
    built_for = BuiltFor(library=LIBRARY, version=release, compute_capabilities=compute_capabilities)
    described = _described(target, config, info, interpreter)
    write_bundle(out, TrtllmBundle(backend=BACKEND, files=files, built_for=built_for, **described, **fields))
    progress("build", STEPS, STEPS)


def compile_engine(checkpoint: Path, out: Path, flags: settings.Settings, python: str, timeout_s: float) -> None:
    """Run trtllm-build on a checkpoint. Raises UserError with TensorRT-LLM's last line of output when it fails."""
    ranks = checkpoints.read_config(checkpoint)["mapping"]["tp_size"]
    with Worker(python) as worker:
        arguments = settings.build_flags(flags, str(checkpoint.absolute()), str(out.absolute()), ranks)
        try:
            worker.call("build", timeout_s, key="backend.build_timeout_s", answer=EmptyAnswer, flags=arguments)
        except WorkerError as error:
            raise UserError(f"backend.python={python}: {error}; it last said: {worker.last_line()}") from error
    missing = [f"rank{rank}.engine" for rank in range(ranks) if not (out / f"rank{rank}.engine").is_file()]
    if missing or not (out / checkpoints.CONFIG_FILE).is_file():
        raise UserError(f"backend.python={python}: trtllm-build wrote no {', '.join(missing) or checkpoints.CONFIG_FILE}")


def _build_engine(
    export: Path,
    out: Path,
    config: TrtllmConfig,
    policy: KVPolicy,  # noqa: ARG001  (as _pin_llm_args)
    interpreter: Interpreter,
) -> dict[str, Any]:
    """Build a TensorRT engine and return the fields of its bundle.json."""
    source = out / CHECKPOINT
    checkpoints.write_checkpoint(export, source, config.tensor_parallel_size)
    checkpoint = checkpoints.read_config(source)
    flags = settings.engine_settings(config, checkpoint["quantization"])
    compile_engine(source, out / ENGINE, flags, interpreter.python, config.build_timeout_s)
    expected = settings.expected_config(flags, checkpoint, interpreter.release)
    rewritten = settings.differences(expected, checkpoints.read_config(out / ENGINE))
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    return {
        "asked": {**expected, **{f"build_config.{key}": value for key, value in flags.items()}},
        "evaluated_with": settings.evaluation_of_engine(config),
        "rewritten": {key: built for key, _, built in rewritten},
        "cache_dtype": CACHE_DTYPES.get(checkpoint["quantization"].get("kv_cache_quant_algo"), checkpoint["dtype"]),
        "kv_scales": checkpoints.kv_scales(source),
    }


def _pin_llm_args(export: Path, out: Path, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> dict[str, Any]:
    """Write a checkpoint with the LLM arguments of serving, and return the fields of its bundle.json."""
    source = out / CHECKPOINT
    source.mkdir()
    for path in sorted(export.iterdir()):
        if path.suffix == ".safetensors":
            link_or_copy(path, source / path.name)
        else:
            shutil.copyfile(path, source / path.name)
    pinned = settings.llm_args(config, policy)
    evaluated_with = settings.evaluation_of_served(pinned)
    rewritten: list[settings.Difference] = []
    with Worker(interpreter.python) as worker:
        for arguments in (pinned, evaluated_with):
            try:
                answer = worker.call(
                    "validate",
                    config.build_timeout_s,
                    key="backend.build_timeout_s",
                    answer=ValidatedArguments,
                    model=str(source.absolute()),
                    llm_args=arguments,
                )
            except WorkerError as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"backend.serving: TensorRT-LLM {interpreter.release} refuses these LLM arguments: {reason}"
                ) from error
            rewritten += settings.differences(settings.flatten(arguments), answer.llm_args)
    settings.refuse_rewrites(rewritten, config.allow_rewrites)
    text = OmegaConf.to_yaml(pinned)
    (out / LLM_ARGS_FILE).write_text(
        f"# {LIBRARY} {interpreter.release}: trtllm-serve {CHECKPOINT} --config {LLM_ARGS_FILE}\n{text}", encoding="utf-8"
    )
    checkpoint = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "asked": settings.flatten(pinned),
        "evaluated_with": evaluated_with,
        "rewritten": {key: built for key, _, built in rewritten},
        "cache_dtype": "fp8" if policy.quantized else str(checkpoint.get("dtype") or checkpoint["torch_dtype"]),
        "kv_scales": [1.0] * checkpoint["num_hidden_layers"] if policy.quantized else [],
    }


def _described(target: TargetName, config: TrtllmConfig, info: CheckpointInfo, interpreter: Interpreter) -> dict[str, Any]:
    return {
        "target": target,
        "gpus": [f"{name}, driver {driver}" for name, _, driver in interpreter.gpus[: config.tensor_parallel_size]],
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_input_len": config.max_input_len,
        "max_seq_len": config.max_seq_len,
        "layers": info.shape.layers,
        "kv_heads": info.shape.kv_heads,
        "head_dim": info.shape.head_dim,
        "vocab_size": info.vocab_size,
    }


def _missing_export(exports: Path, export: str) -> str:
    """The reason that is recorded for an export that was not written."""
    report = json.loads((exports / "exports.json").read_text(encoding="utf-8"))
    return str(report[export].get("reason", "see exports.json"))
