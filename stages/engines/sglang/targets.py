"""Which policies SGLang's cache can hold, and as what; its arguments of serving and of an evaluation."""

from typing import Any

from pipeline.artifacts.backend import Job
from pipeline.checkpoint.description import refuse_sliding_layers
from pipeline.checkpoint.exports import describe_format, holder
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import KVPolicy
from stages.engines.sglang.config import SglangConfig
from stages.engines.sglang.interpreter import INSTALL_HINT, probe

CHOICES = "kv=fp16, bf16, fp8_uncalibrated or fp8_e5m2"


def check_inputs(config: SglangConfig, job: Job) -> None:
    """Refuse what SGLang's cache cannot hold, and a machine without it.

    Raises:
        UserError: naming the key that it cannot hold.
        MissingRequirement: naming the interpreter or the GPU that is not here.
    """
    cache_dtype(job.policy, config)
    refuse_sliding_layers(job.checkpoint, "backend=sglang was not shown to keep to that")
    if job.weights != "none":
        raise UserError(f"weights={job.weights}: backend=sglang is given 16-bit weights; set weights=none")
    if config.context_length > job.checkpoint.max_positions:
        raise UserError(
            f"backend.context_length={config.context_length}: the model was made for {job.checkpoint.max_positions} tokens; "
            "set at most that"
        )
    interpreter = probe(config.python)
    if job.judges and not interpreter.description.devices:
        raise MissingRequirement(f"backend.python={config.python}: SGLang finds no GPU there; {INSTALL_HINT}")


def cache_dtype(policy: KVPolicy, config: SglangConfig) -> str:
    """Return the type of SGLang's cache that holds a policy. Raises UserError when none does."""
    forms = {describe_format(form) for form in dict(policy.formats).values()}
    if len(forms) > 1 or policy.exact_tokens or policy.window is not None or policy.eviction is not None:
        reason = "its cache has one type for all keys and values of all tokens"
    elif policy.key.exact:
        if policy.key.dtype == "fp16" or policy.key.code.storage.torch == config.dtype:
            return "auto"
        reason = f"a cache that is not quantized is of backend.dtype={config.dtype}"
    elif policy.key.code.sglang is not None and policy.key.scale == "uncalibrated" and policy.key.rotation == "none":
        return policy.key.code.sglang
    else:
        reason = f"{forms.pop()} has no equal there, or takes scales, which are not handed over"
    raise UserError(
        f"kv={policy.name}: backend=sglang cannot hold it ({reason}); choose {CHOICES}, or {holder(policy)}, which runs it"
    )


def server_args(config: SglangConfig, cache: str) -> dict[str, Any]:
    """Return the arguments of serving, by the names of SGLang's ServerArgs."""
    arguments: dict[str, Any] = {
        "dtype": config.dtype,
        "kv_cache_dtype": cache,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "chunked_prefill_size": config.chunked_prefill_size,
        "mem_fraction_static": config.mem_fraction_static,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "random_seed": 0,
    }
    if config.attention_backend is not None:
        arguments["attention_backend"] = config.attention_backend
    return arguments


def evaluation(serving: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of evaluating what is served with `serving`.

    No prompt comes from the cache, and no step is scheduled before the last one's tokens are known: a processor would see each
    token a step late.
    """
    return {
        **serving,
        "enable_custom_logit_processor": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "log_level": "error",
    }


def command(arguments: dict[str, Any], checkpoint: str) -> str:
    """Return the command that serves a checkpoint with these arguments."""
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in arguments.items() if not isinstance(value, bool)]
    return f"python -m sglang.launch_server --model-path {checkpoint} {' '.join(flags)}"
