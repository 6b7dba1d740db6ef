"""Implements backend=sglang: maps a policy to a cache type, and builds bundles of a checkpoint and the server's command."""

from pathlib import Path
from typing import Any

from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.exports import describe_format, single_format_refusal
from stages.core.errors import MissingRequirement, UserError
from stages.engines.backend import Job
from stages.engines.interpreter.backend import CHECKPOINT, InterpreterBackend, cannot_hold, copy_linking_weights
from stages.engines.interpreter.process import Program
from stages.engines.sglang import worker
from stages.engines.sglang.config import SglangConfig
from stages.policies.policy import KVPolicy

CHECKED_RELEASE = "0.5.23"
PROGRAM = Program(
    "sglang",
    "SGLang",
    Path(worker.__file__).with_name("kvgate_sglang_worker.py"),
    "on a machine with CUDA 13 and an NVIDIA GPU give the python of an environment with pip install "
    f"sglang=={CHECKED_RELEASE}, or python3 where kvgate runs in the container lmsysorg/sglang:v{CHECKED_RELEASE}",
    {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_USE_MODELSCOPE": "0"},
    checked_releases=(CHECKED_RELEASE,),
)
COMMAND_FILE = "launch.txt"


def cache_dtype(policy: KVPolicy, config: SglangConfig) -> str:
    """Return the type of SGLang's cache that stores a policy. Raises UserError if no type does."""
    key, reason = policy.key, single_format_refusal(policy)
    if reason is None and key.exact:
        if key.dtype == "fp16" or key.code.storage.torch == config.dtype:
            return "auto"
        reason = f"an unquantized cache must use backend.dtype={config.dtype}"
    if reason is None and key.code.sglang is not None and key.scale == "uncalibrated" and key.rotation == "none":
        return key.code.sglang
    reason = reason or f"{describe_format(key)} is not supported by this engine, or needs scales, which it does not receive"
    raise UserError(cannot_hold(policy, "sglang", reason, "kv=fp16, bf16, fp8_uncalibrated or fp8_e5m2"))


def server_args(config: SglangConfig, cache: str) -> dict[str, Any]:
    """Return the server's arguments, under the names of SGLang's ServerArgs."""
    configured = config.model_dump(exclude={"name", "python"}, exclude_none=True)
    return {**configured, "kv_cache_dtype": cache, "load_format": "safetensors", "trust_remote_code": False, "random_seed": 0}


class SglangBackend(InterpreterBackend[SglangConfig]):
    """A backend whose bundle is the checkpoint and the arguments of SGLang's server."""

    program = PROGRAM

    def check_inputs(self, job: Job) -> None:
        if not job.builds:
            return
        cache_dtype(job.policy, self.config)
        self._check_checkpoint(job)
        if not self.interpreter.devices and job.judges:
            raise MissingRequirement(f"backend.python={self.config.python}: SGLang finds no GPU there; {PROGRAM.hint}")

    def write_served(self, out: Path, info: CheckpointInfo, policy: KVPolicy) -> dict[str, Any]:
        """Write the checkpoint and the command. A policy of this backend has no scales, or scales of 1.0."""
        copy_linking_weights((*info.weight_files, *info.other_files), info.path, out / CHECKPOINT)
        arguments = server_args(self.config, cache_dtype(policy, self.config))
        self._check_arguments(out / CHECKPOINT, "server_args", arguments)
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in arguments.items() if not isinstance(value, bool)]
        command = f"python -m sglang.launch_server --model-path {CHECKPOINT} {' '.join(flags)}\n"
        (out / COMMAND_FILE).write_text(command, encoding="utf-8")
        return {"arguments": arguments, "max_batch": self.config.max_running_requests}


open_backend = SglangBackend
