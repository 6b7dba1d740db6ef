"""A quantized checkpoint to a bundle of TensorRT-LLM: a TensorRT engine, or a checkpoint with LLM arguments."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.files import link_or_copy
from pipeline.core.backends import TrtllmConfig
from pipeline.core.checkpoint import TOKENIZER_FILES, CheckpointInfo, inspect_checkpoint
from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, SCALES_FILE, KVPolicy
from pipeline.core.records import Progress
from stages.engines.bundle import BuiltFor, read_scales, write_bundle, write_policy
from stages.engines.trtllm import checkpoint as checkpoints
from stages.engines.trtllm import settings
from stages.engines.trtllm.bundle import BACKEND, CHECKPOINT, ENGINE, LIBRARY, LLM_ARGS_FILE, TrtllmBundle
from stages.engines.trtllm.interpreter import Interpreter, Worker, WorkerError, files_below, probe
from stages.engines.trtllm.protocol import Done, Validated
from stages.engines.trtllm.targets import TARGETS, TargetName, resolve

STEPS = 3
CACHE_DTYPES = {"FP8": "fp8", "INT8": "int8"}


def build_bundle(
    quantized: Path,
    out: Path,
    *,
    policy: KVPolicy,
    scales: Path,
    progress: Progress,
    release: str,
    compute_capabilities: list[str],
    **options: object,
) -> None:
    """Fill the empty directory `out` with a bundle.

    `quantized` is what stage=quantize wrote, `options` are TrtllmConfig's build_options with the target
    decided, the others what `targets.interpreter_parts` says of the interpreter. Raises UserError when the policy
    has no export for the target, when TensorRT-LLM fails, and when it built something else than was asked;
    MissingRequirement when it is not here.
    """
    asked = TrtllmConfig.model_validate({**options, "name": BACKEND, "request_timeout_s": 1})
    found, target = probe(asked.python), cast(TargetName, asked.target)
    assert (found.release, target) == (release, resolve(target, found)), "the interpreter changed since it was probed"
    export = quantized / TARGETS[target].export
    if not export.is_dir():
        raise UserError(f"kv={policy.name}: ModelOpt wrote no {export.name} export, {_why(quantized, export.name)}")
    info = inspect_checkpoint(quantized / "checkpoint")
    write_policy(out, policy, read_scales(scales, policy, info.shape))
    for name in TOKENIZER_FILES:
        if (quantized / "checkpoint" / name).is_file():
            shutil.copyfile(quantized / "checkpoint" / name, out / name)
    progress("build", 0, STEPS)
    make = _build_engine if target == "engine" else _pin_llm_args
    made = make(export, out, asked, policy, found)
    progress("build", STEPS - 1, STEPS)
    names = files_below(out, (POLICY_FILE, SCALES_FILE, f"{ENGINE}/*", f"{CHECKPOINT}/*", LLM_ARGS_FILE))
    files = {name: file_digest(out / name) for name in names}
    built_for = BuiltFor(library=LIBRARY, version=release, compute_capabilities=compute_capabilities)
    described = _described(target, asked, info, found)
    write_bundle(out, TrtllmBundle(backend=BACKEND, files=files, built_for=built_for, **described, **made))
    progress("build", STEPS, STEPS)


def compile_engine(checkpoint: Path, out: Path, flags: settings.Settings, python: str, timeout_s: float) -> None:
    """Run trtllm-build on a checkpoint; UserError with TensorRT-LLM's last words when it fails."""
    ranks = checkpoints.read_config(checkpoint)["mapping"]["tp_size"]
    with Worker(python) as worker:
        arguments = settings.build_flags(flags, str(checkpoint.absolute()), str(out.absolute()), ranks)
        try:
            worker.call("build", timeout_s, key="backend.build_timeout_s", answer=Done, flags=arguments)
        except WorkerError as error:
            raise UserError(f"backend.python={python}: {error}; it last said: {worker.last_words()}") from error
    missing = [f"rank{rank}.engine" for rank in range(ranks) if not (out / f"rank{rank}.engine").is_file()]
    if missing or not (out / checkpoints.CONFIG_FILE).is_file():
        raise UserError(f"backend.python={python}: trtllm-build wrote no {', '.join(missing) or checkpoints.CONFIG_FILE}")


def _build_engine(export: Path, out: Path, asked: TrtllmConfig, policy: KVPolicy, found: Interpreter) -> dict[str, Any]:  # noqa: ARG001
    source = out / CHECKPOINT
    checkpoints.write_checkpoint(export, source, asked.tensor_parallel_size)
    config = checkpoints.read_config(source)
    wanted = settings.engine_settings(asked, config["quantization"])
    compile_engine(source, out / ENGINE, wanted, found.python, asked.build_timeout_s)
    promised = settings.asked_of_engine(wanted, config, found.release)
    rewritten = settings.differences(promised, checkpoints.read_config(out / ENGINE))
    settings.refuse_rewrites(rewritten, asked.allow_rewrites)
    return {
        "asked": {**promised, **{f"build_config.{key}": value for key, value in wanted.items()}},
        "evaluated_with": settings.evaluation_of_engine(asked),
        "rewritten": {key: got for key, _, got in rewritten},
        "cache_dtype": CACHE_DTYPES.get(config["quantization"].get("kv_cache_quant_algo"), config["dtype"]),
        "kv_scales": checkpoints.kv_scales(source),
    }


def _pin_llm_args(export: Path, out: Path, asked: TrtllmConfig, policy: KVPolicy, found: Interpreter) -> dict[str, Any]:
    source = out / CHECKPOINT
    source.mkdir()
    for path in sorted(export.iterdir()):
        if path.suffix == ".safetensors":
            link_or_copy(path, source / path.name)
        else:
            shutil.copyfile(path, source / path.name)
    pinned = settings.llm_args(asked, policy)
    evaluated_with = settings.evaluation_of_served(pinned)
    rewritten: list[settings.Difference] = []
    with Worker(found.python) as worker:
        for wanted in (pinned, evaluated_with):
            try:
                answer = worker.call(
                    "validate",
                    asked.build_timeout_s,
                    key="backend.build_timeout_s",
                    answer=Validated,
                    model=str(source.absolute()),
                    llm_args=wanted,
                )
            except WorkerError as error:
                raise UserError(
                    f"backend.serving: TensorRT-LLM {found.release} refuses these LLM arguments: {' '.join(str(error).split())}"
                ) from error
            rewritten += settings.differences(settings.flatten(wanted), answer.llm_args)
    settings.refuse_rewrites(rewritten, asked.allow_rewrites)
    text = OmegaConf.to_yaml(pinned)
    (out / LLM_ARGS_FILE).write_text(
        f"# {LIBRARY} {found.release}: trtllm-serve {CHECKPOINT} --config {LLM_ARGS_FILE}\n{text}", encoding="utf-8"
    )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "asked": settings.flatten(pinned),
        "evaluated_with": evaluated_with,
        "rewritten": {key: got for key, _, got in rewritten},
        "cache_dtype": "fp8" if policy.quantized else str(config.get("dtype") or config["torch_dtype"]),
        "kv_scales": [1.0] * config["num_hidden_layers"] if policy.quantized else [],
    }


def _described(target: TargetName, asked: TrtllmConfig, info: CheckpointInfo, found: Interpreter) -> dict[str, Any]:
    return {
        "target": target,
        "gpus": [f"{name}, driver {driver}" for name, _, driver in found.gpus[: asked.tensor_parallel_size]],
        "tensor_parallel_size": asked.tensor_parallel_size,
        "max_input_len": asked.max_input_len,
        "max_seq_len": asked.max_seq_len,
        "layers": info.shape.layers,
        "kv_heads": info.shape.kv_heads,
        "head_dim": info.shape.head_dim,
        "vocab_size": info.vocab_size,
    }


def _why(quantized: Path, export: str) -> str:
    """The quantize stage's own reason."""
    report = json.loads((quantized / "quantizers.json").read_text(encoding="utf-8"))["exports"]
    return str(report[export].get("reason", "see quantizers.json"))
