"""Builds a bundle of vLLM: the checkpoint with the cache's scales, and the engine arguments of `vllm serve`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.core.records import Progress
from stages.engines.interpreter.bundle import CHECKPOINT, ServedBundle, begin_bundle, end_bundle, resolve
from stages.engines.interpreter.config import InterpreterConfig
from stages.engines.vllm.checkpoint import delivers_scales, write_checkpoint
from stages.engines.vllm.config import VllmConfig
from stages.engines.vllm.library import PROGRAM, cache_dtype, skipped_layers
from stages.policies.policy import KVPolicy

STEPS = 2
NOT_VLLMS = ("threads", "kv_cache_gib")
"""Keys of the configuration that are not engine arguments, or have another name there."""
ENGINE_ARGS_FILE = "engine_args.yaml"
"""File for `vllm serve BUNDLE/checkpoint --config BUNDLE/engine_args.yaml`."""


class VllmBundle(ServedBundle):
    """`bundle.json`."""

    platform: str
    """vLLM's platform: cpu or cuda."""
    resolved: dict[str, Any]
    """The checked arguments, as vLLM resolves them for this model."""
    kv_scales_in_checkpoint: bool


def build_bundle(
    checkpoint: Path, out: Path, config: VllmConfig, *, policy: KVPolicy, scales: Path, progress: Progress
) -> None:
    """Write a bundle of a quantized checkpoint to the empty directory `out`; `scales` is a kv_scales.json."""
    interpreter, info, measured = begin_bundle(PROGRAM, config, checkpoint, out, policy, scales, progress)
    progress("build", 0, STEPS)
    write_checkpoint(info, out / CHECKPOINT, policy, measured)
    arguments = engine_args(config, cache_dtype(policy, config), skipped_layers(policy) or [])
    progress("build", 1, STEPS)
    resolved = resolve(interpreter, out / CHECKPOINT, "engine_args", arguments, config.request_timeout_s)
    flags = OmegaConf.to_yaml({name.replace("_", "-"): value for name, value in arguments.items()})
    command = f"# vLLM {interpreter.release}: vllm serve {CHECKPOINT} --config {ENGINE_ARGS_FILE}"
    (out / ENGINE_ARGS_FILE).write_text(f"{command}\n{flags}", encoding="utf-8")
    end_bundle(
        out, VllmBundle, interpreter, info,
        max_tokens=config.max_model_len, max_batch=config.max_num_seqs, arguments=arguments, resolved=resolved,
        platform=interpreter.description.platform, kv_scales_in_checkpoint=delivers_scales(policy),
    )  # fmt: skip
    progress("build", STEPS, STEPS)


def engine_args(config: VllmConfig, cache_dtype: str, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Return the engine arguments for serving, under the names of vLLM's EngineArgs."""
    given = config.model_dump(exclude={*NOT_VLLMS, *InterpreterConfig.model_fields})
    step_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    fixed = {"kv_cache_dtype": cache_dtype, "trust_remote_code": False, "load_format": "safetensors", "seed": 0}
    arguments: dict[str, Any] = {**given, "max_num_batched_tokens": step_tokens, **fixed}
    if skipped:
        arguments["kv_cache_dtype_skip_layers"] = list(skipped)
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    return arguments
