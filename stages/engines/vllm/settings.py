"""vLLM's engine arguments: those of serving, those of an evaluation, and what vLLM makes of them."""

from collections.abc import Mapping
from typing import Any

from stages.engines.vllm.config import VllmConfig

Settings = dict[str, Any]

LOGPROBS = 20
"""Log-probabilities a token that may be asked for: an evaluation asks for that of the token itself."""


def engine_args(config: VllmConfig, cache_dtype: str) -> Settings:
    """Return the engine arguments of serving, by the names of vLLM's EngineArgs."""
    arguments: Settings = {
        "dtype": config.dtype,
        "kv_cache_dtype": cache_dtype,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "seed": 0,
    }
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    return arguments


def evaluation(serving: Mapping[str, Any], *, prefix_caching: bool = False) -> Settings:
    """Return the engine arguments of evaluating what is served with `serving`.

    No prompt comes from the cache, unless that is what is looked at, and no step is scheduled before the last one's tokens are
    known: a logits processor would see each token a step late.
    """
    return {
        **serving,
        "enable_prefix_caching": prefix_caching,
        "async_scheduling": False,
        "max_logprobs": LOGPROBS,
        "disable_log_stats": False,
    }


def as_flags(arguments: Mapping[str, Any]) -> Settings:
    """Return engine arguments as `vllm serve --config FILE` reads them: names with dashes."""
    return {name.replace("_", "-"): value for name, value in arguments.items()}


def differences(asked: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that vLLM resolves otherwise: name -> (asked, resolved). `auto` is its own choice."""
    return {
        name: (value, resolved[name])
        for name, value in asked.items()
        if name in resolved and value != "auto" and value != resolved[name]
    }
