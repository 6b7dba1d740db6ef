"""TensorRT-LLM's settings as build flags and LLM arguments, and the check that TensorRT-LLM did not change them."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.core.errors import UserError
from stages.engines.interpreter.process import Interpreter
from stages.engines.trtllm.config import TargetName, TrtllmConfig
from stages.policies.policy import PAGE_TOKENS, KVPolicy

LOGITS_DTYPE = "float32"
FP8_ATTENTION_WEIGHTS = ("FP8", "W4A8_AWQ", "NVFP4")
"""Quantization algorithms of weights for which TensorRT-LLM computes attention of prompts in FP8."""
SIZES = {"max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens"}
"""Keys of the configuration with the same name in trtllm-build and in the LLM arguments."""
Settings = dict[str, Any]


def rank_environment(ranks: int) -> dict[str, str]:
    """Return a worker's environment variables for a model on `ranks` GPUs.

    A single rank runs inside the worker: logits return fastest, and the must-fail control of target=pytorch can reach its
    layers. Several ranks run in separate processes.
    """
    return {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"} if ranks == 1 else {}


def rank_capabilities(target: TargetName, interpreter: Interpreter, ranks: int) -> list[str]:
    """Return the compute capability of an engine in a list; empty for pytorch. Raises UserError if the ranks' GPUs differ."""
    capabilities = [device.compute_cap for device in interpreter.devices[:ranks]] if target == "engine" else []
    if len(set(capabilities)) > 1:
        raise UserError(
            f"backend.tensor_parallel_size={ranks}: GPUs 0 to {len(capabilities) - 1} are SM {', '.join(capabilities)}, "
            "but an engine is built for one kind; choose equal GPUs with CUDA_VISIBLE_DEVICES"
        )
    return capabilities[:1]


def engine_settings(options: TrtllmConfig, quantization: Mapping[str, Any]) -> Settings:
    """Return trtllm-build's settings, keyed as in build_config of the engine's config.json (including plugin_config.*).

    Attention of prompts reads the paged cache and computes in FP8 for the combinations that TensorRT-LLM supports.
    """
    weights, cache = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    fp8_attention = weights in FP8_ATTENTION_WEIGHTS and cache == "FP8"
    return {
        **options.model_dump(include=SIZES),
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "gather_context_logits": False,
        "plugin_config.gpt_attention_plugin": "auto",
        "plugin_config.gemm_plugin": "auto",
        "plugin_config.context_fmha": True,
        "plugin_config.remove_input_padding": True,
        "plugin_config.tokens_per_block": PAGE_TOKENS,
        "plugin_config.use_paged_context_fmha": cache is None or fp8_attention,
        "plugin_config.use_fp8_context_fmha": fp8_attention,
    }


def build_flags(settings: Settings, checkpoint: str, out: str, ranks: int) -> list[str]:
    flags = ["--checkpoint_dir", checkpoint, "--output_dir", out, "--workers", str(ranks), "--logits_dtype", LOGITS_DTYPE]
    for key, value in settings.items():
        name = f"--{key.removeprefix('plugin_config.')}"
        if key.startswith("plugin_config.") and isinstance(value, bool):
            flags += [name, "enable" if value else "disable"]
        elif isinstance(value, bool):
            flags += [name] if value else []
        else:
            flags += [name, str(value)]
    return flags


def expected_config(settings: Settings, checkpoint: Mapping[str, Any], release: str) -> Settings:
    """Return the values that the engine's config.json must contain, except `auto` settings, which TensorRT-LLM chooses."""
    build_config = {f"build_config.{key}": value for key, value in settings.items() if value != "auto"}
    return {
        "version": release,
        "pretrained_config.architecture": checkpoint["architecture"],
        "pretrained_config.dtype": checkpoint["dtype"],
        "pretrained_config.logits_dtype": LOGITS_DTYPE,
        "pretrained_config.mapping.tp_size": checkpoint["mapping"]["tp_size"],
        "pretrained_config.quantization.quant_algo": checkpoint["quantization"].get("quant_algo"),
        "pretrained_config.quantization.kv_cache_quant_algo": checkpoint["quantization"].get("kv_cache_quant_algo"),
        **build_config,
    }


def llm_args(options: TrtllmConfig, policy: KVPolicy) -> Settings:
    """Return the LLM arguments of serving, for `trtllm-serve MODEL --config FILE`."""
    serving = options.serving
    cache: Settings = {
        "dtype": "fp8" if policy.quantized else "auto",
        "enable_block_reuse": serving.enable_block_reuse,
        "free_gpu_memory_fraction": serving.free_gpu_memory_fraction,
        "tokens_per_block": PAGE_TOKENS,
    }
    return {
        "backend": "pytorch",
        "tensor_parallel_size": options.tensor_parallel_size,
        **options.model_dump(include=SIZES),
        "enable_chunked_prefill": False,
        "kv_cache_config": cache,
    }


def evaluation_of_engine(options: TrtllmConfig) -> Settings:
    """Return the LLM arguments of evaluating an engine: without block reuse."""
    cache = {"enable_block_reuse": False, "free_gpu_memory_fraction": options.serving.free_gpu_memory_fraction}
    return {"skip_tokenizer_init": True, "tensor_parallel_size": options.tensor_parallel_size, "kv_cache_config": cache}


def evaluation_of_served(serving: Settings) -> Settings:
    """Return the LLM arguments of evaluating a checkpoint that is served with `serving`.

    Block reuse stays enabled if it is enabled in serving, because it selects the kernel and the data type for prompts. Each
    request has its own salt, so no request reuses another's blocks. Overlap is disabled because a logits processor would see
    each token one step late.
    """
    return {**serving, "skip_tokenizer_init": True, "disable_overlap_scheduler": True}


def differences(expected: Settings, built: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ in `built`. A missing key counts as null. Strings are compared case-insensitively."""
    changes = []
    for key, value in expected.items():
        actual: Any = built
        for part in key.split("."):
            actual = actual.get(part) if isinstance(actual, Mapping) else None
        both_text = isinstance(value, str) and isinstance(actual, str)
        if not (value.lower() == actual.lower() if both_text else value == actual):
            changes.append(f"{key}={value} became {actual}")
    return changes


def refuse_changes(changes: Sequence[str], interpreter: Interpreter) -> None:
    """Raise UserError if TensorRT-LLM changed any setting."""
    if changes:
        raise UserError(
            f"backend.python={interpreter.python}: TensorRT-LLM {interpreter.release} changed settings: {'; '.join(changes)}; "
            "configure the new values, or give another release"
        )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return nested settings as dotted key -> value.

    >>> flatten({"build_config": {"max_batch_size": 8}})
    {'build_config.max_batch_size': 8}
    """
    flat: Settings = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
