"""What TensorRT-LLM is asked for, in its own words, and whether it did that: flags of trtllm-build, LLM arguments."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.core.backends import TrtllmConfig
from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy

LOGITS_DTYPE = "float32"
FP8_ATTENTION_WEIGHTS = ("FP8", "W4A8_AWQ", "NVFP4")
"""Weights with which TensorRT-LLM computes the attention of prompts in FP8."""
RETURN_LOGITS = {"gather_generation_logits": True, "skip_tokenizer_init": True}
"""LLM arguments of every evaluation."""

Settings = dict[str, Any]
Difference = tuple[str, Any, Any]
"""Key, asked, built."""


def engine_settings(options: TrtllmConfig, quantization: Mapping[str, Any]) -> Settings:
    """What trtllm-build is asked for, by the keys of the engine's config.json below build_config (plugin_config.* included).

    `quantization` is the checkpoint's. `auto` asks for what the release keeps (see tests/contract/facts).
    """
    weights, cache = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    fp8_attention = weights in FP8_ATTENTION_WEIGHTS and cache == "FP8"
    paged = cache is None or fp8_attention
    return {
        "max_batch_size": options.max_batch_size,
        "max_input_len": options.max_input_len,
        "max_seq_len": options.max_seq_len,
        "max_num_tokens": options.max_num_tokens,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "gather_context_logits": options.gather_context_logits,
        "gather_generation_logits": True,
        "plugin_config.gpt_attention_plugin": "auto",
        "plugin_config.gemm_plugin": "auto",
        "plugin_config.context_fmha": True,
        "plugin_config.remove_input_padding": True,
        "plugin_config.tokens_per_block": PAGE_TOKENS,
        "plugin_config.use_paged_context_fmha": _switch(options.paged_context_fmha, auto=paged),
        "plugin_config.use_fp8_context_fmha": _switch(options.fp8_context_fmha, auto=fp8_attention),
    }


def build_flags(settings: Settings, checkpoint: str, out: str, ranks: int) -> list[str]:
    """Arguments of trtllm-build."""
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


def asked_of_engine(settings: Settings, checkpoint: Mapping[str, Any], release: str) -> Settings:
    """What the engine's config.json must say, by its keys. `auto` leaves the choice to TensorRT-LLM."""
    asked = {f"build_config.{key}": value for key, value in settings.items() if value != "auto"}
    return {
        "version": release,
        "pretrained_config.architecture": checkpoint["architecture"],
        "pretrained_config.dtype": checkpoint["dtype"],
        "pretrained_config.logits_dtype": LOGITS_DTYPE,
        "pretrained_config.mapping.tp_size": checkpoint["mapping"]["tp_size"],
        "pretrained_config.quantization.quant_algo": checkpoint["quantization"].get("quant_algo"),
        "pretrained_config.quantization.kv_cache_quant_algo": checkpoint["quantization"].get("kv_cache_quant_algo"),
        **asked,
    }


def llm_args(options: TrtllmConfig, policy: KVPolicy) -> Settings:
    """The LLM arguments that `trtllm-serve MODEL --config FILE` takes."""
    serving = options.serving
    cache: Settings = {
        "dtype": "fp8" if policy.quantized else "auto",
        "enable_block_reuse": serving.enable_block_reuse,
        "free_gpu_memory_fraction": serving.free_gpu_memory_fraction,
        "host_cache_size": int(serving.host_cache_gib * (1 << 30)),
        "tokens_per_block": PAGE_TOKENS,
    }
    if serving.attention_windows is not None:
        cache["max_attention_window"] = list(serving.attention_windows)
    found: Settings = {
        "backend": "pytorch",
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_batch_size": options.max_batch_size,
        "max_input_len": options.max_input_len,
        "max_seq_len": options.max_seq_len,
        "max_num_tokens": options.max_num_tokens,
        "kv_cache_config": cache,
    }
    if serving.speculation is not None:
        found["speculative_config"] = serving.speculation.model_dump(mode="json", exclude_none=True)
    return found


def evaluation_of_engine(options: TrtllmConfig) -> Settings:
    """LLM arguments for an engine: every generated token's logits are returned, and no prompt is taken from the cache."""
    cache = {"enable_block_reuse": False, "free_gpu_memory_fraction": options.serving.free_gpu_memory_fraction}
    return {**RETURN_LOGITS, "tensor_parallel_size": options.tensor_parallel_size, "kv_cache_config": cache}


def evaluation_of_served(serving: Settings) -> Settings:
    """The same for LLM arguments of serving: without speculation, whose logits are not returned, and without overlap, in which
    a processor would see a step late what was generated."""
    kept = {key: value for key, value in serving.items() if key != "speculative_config"}
    cache = {**serving["kv_cache_config"], "enable_block_reuse": False}
    return {**kept, **RETURN_LOGITS, "disable_overlap_scheduler": True, "kv_cache_config": cache}


def differences(asked: Settings, built: Mapping[str, Any]) -> list[Difference]:
    """What was built otherwise than asked; a key that is not there was not built. Words are compared without their case."""
    found = []
    for key, value in asked.items():
        got: Any = built
        for part in key.split("."):
            got = got.get(part) if isinstance(got, Mapping) else None
        same = value.lower() == got.lower() if isinstance(value, str) and isinstance(got, str) else value == got
        if not same:
            found.append((key, value, got))
    return found


def refuse_rewrites(found: Iterable[Difference], allowed: Sequence[str]) -> None:
    """UserError that lists every difference whose key (or its last part) is not allowed."""
    left = [(key, asked, got) for key, asked, got in found if not {key, key.rpartition(".")[2]} & set(allowed)]
    if left:
        listed = "; ".join(f"{key} was asked as {asked} and is {got}" for key, asked, got in left)
        names = ",".join(key.rpartition(".")[2] for key, _, _ in left)
        raise UserError(
            f"backend.allow_rewrites={list(allowed)}: TensorRT-LLM built something else: {listed}; ask for what it builds, or "
            f"set backend.allow_rewrites=[{names}]"
        )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested settings by their dotted keys."""
    found: Settings = {}
    for key, value in settings.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _switch(asked: str, *, auto: bool) -> bool:
    return auto if asked == "auto" else asked == "enable"
