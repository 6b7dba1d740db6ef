"""Builds a bundle of vLLM: the checkpoint with the cache's scales, and the engine arguments of `vllm serve`."""

import shutil
from pathlib import Path

from omegaconf import OmegaConf

from pipeline.artifacts.digest import file_digest
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, KVPolicy
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE
from stages.engines.bundle import BuiltFor, read_scales, write_bundle, write_policy
from stages.engines.interpreter.process import WorkerError
from stages.engines.vllm import settings
from stages.engines.vllm.bundle import BACKEND, CHECKPOINT, ENGINE_ARGS_FILE, LIBRARY, VllmBundle
from stages.engines.vllm.checkpoint import delivers_scales, write_checkpoint
from stages.engines.vllm.config import VllmConfig
from stages.engines.vllm.interpreter import Interpreter, Worker, probe
from stages.engines.vllm.protocol import ValidatedArguments
from stages.engines.vllm.targets import cache_dtypes, chosen

STEPS = 2


def build_bundle(
    checkpoint: Path,
    out: Path,
    *,
    policy: KVPolicy,
    scales: Path,
    progress: Progress,
    release: str,
    platform: str,
    **options: object,
) -> None:
    """Write a bundle.

    Args:
        checkpoint: The quantized checkpoint.
        out: An empty directory.
        policy: How the cache is stored.
        scales: The policy's static scales, a kv_scales.json.
        progress: Called with the steps that are done.
        release: The interpreter's release of vLLM.
        platform: What vLLM runs on there.
        options: The backend's build_parts.

    Raises:
        UserError: vLLM has no such cache, refuses the engine arguments, or makes others of them.
        MissingRequirement: vLLM is not installed.
    """
    config = VllmConfig.model_validate({**options, "name": BACKEND, "request_timeout_s": 600, "threads": None})
    interpreter = probe(config.python)
    assert (interpreter.release, interpreter.description.platform) == (release, platform), (
        "the interpreter changed since it was probed"
    )
    if interpreter.unread is not None:
        progress(interpreter.unread, 0, 0)
    info = inspect_checkpoint(checkpoint)
    measured = read_scales(scales, policy, info.shape)
    write_policy(out, policy, measured)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)
    progress("build", 0, STEPS)
    write_checkpoint(info, out / CHECKPOINT, policy, measured)
    arguments = settings.engine_args(config, chosen(config, cache_dtypes(policy, config)))
    progress("build", 1, STEPS)
    resolved = _resolve(interpreter, out / CHECKPOINT, arguments, config.request_timeout_s)
    command = f"vllm serve {CHECKPOINT} --config {ENGINE_ARGS_FILE}"
    (out / ENGINE_ARGS_FILE).write_text(
        f"# {LIBRARY} {release}: {command}\n{OmegaConf.to_yaml(settings.as_flags(arguments))}", encoding="utf-8"
    )
    names = [POLICY_FILE, SCALES_FILE, ENGINE_ARGS_FILE]
    names += sorted(path.relative_to(out).as_posix() for path in (out / CHECKPOINT).iterdir())
    built_for = BuiltFor(library=LIBRARY, version=release, compute_capabilities=interpreter.compute_capabilities)
    bundle = VllmBundle(
        backend=BACKEND,
        files={name: file_digest(out / name) for name in names},
        built_for=built_for,
        platform=platform,
        layers=info.shape.layers,
        kv_heads=info.shape.kv_heads,
        head_dim=info.shape.head_dim,
        vocab_size=info.vocab_size,
        max_tokens=config.max_model_len,
        max_batch=config.max_num_seqs,
        engine_args=arguments,
        resolved=resolved,
        kv_scales_in_checkpoint=delivers_scales(policy),
    )
    write_bundle(out, bundle)
    progress("build", STEPS, STEPS)


def _resolve(interpreter: Interpreter, checkpoint: Path, arguments: settings.Settings, timeout_s: int) -> settings.Settings:
    """Return the engine arguments as vLLM resolves them. Raises UserError for those that it refuses or changes."""
    with Worker(interpreter.python) as worker:
        try:
            answer = worker.call(
                "validate",
                timeout_s,
                key="backend.request_timeout_s",
                answer=ValidatedArguments,
                model=str(checkpoint.absolute()),
                engine_args=arguments,
            )
        except WorkerError as error:
            raise worker.refusal(f"{interpreter.release} refuses these engine arguments: {error}") from error
    changed = settings.differences(arguments, answer.engine_args)
    if changed:
        listed = "; ".join(f"{name} was asked as {asked} and is {is_now}" for name, (asked, is_now) in changed.items())
        raise UserError(
            f"backend.{next(iter(changed))}: {LIBRARY} {interpreter.release} makes something else of it: {listed}; "
            "ask for what it makes"
        )
    return answer.engine_args
