"""What ModelOpt's official exports can declare of a KV policy and a model, as facts: nothing of ModelOpt is imported.

The quantize stage skips an export that would lie; a backend that is built from an export refuses such a policy up front.
"""

from pipeline.core.checkpoint import CheckpointInfo
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy

KV_ALGORITHMS = {"fp8_e4m3 per_tensor": "FP8", "int8 per_tensor": "INT8"}
UNIFIED_HF_KV = ("FP8",)
TENSORRT_LLM_KV = ("FP8", "INT8")
"""Algorithms of the cache that each export can declare: one for keys and values, with one scale per layer."""


def export_refusal(policy: KVPolicy, algorithms: tuple[str, ...]) -> str | None:
    """Return why an export cannot carry the policy, None when it can.

    Args:
        policy: Formats of the stored keys and values.
        algorithms: The algorithms of the cache that the export can declare, for example UNIFIED_HF_KV.
    """
    formats = {name: describe_format(form) for name, form in policy.formats}
    if policy.exact_tokens:
        return f"{policy.sink_tokens} sink and {policy.recent_tokens} recent exact tokens cannot be declared"
    if policy.window is not None:
        return f"other formats for the last {policy.window.tokens} tokens cannot be declared"
    if policy.eviction is not None:
        return f"eviction.window_tokens={policy.eviction.window_tokens}: an eviction cannot be declared"
    if len(set(formats.values())) > 1:
        listed = ", ".join(f"{name} {description}" for name, description in formats.items())
        return f"{listed}: the exporters know one algorithm for all keys and values and would mislabel some"
    if policy.key.dtype == "fp16" or KV_ALGORITHMS.get(formats["key"]) in algorithms:
        return None
    return f"{formats['key']} keys and values: the export has no name for this format and would refuse, drop or mislabel it"


def tensorrt_llm_refusal(info: CheckpointInfo) -> str | None:
    """Return why TensorRT-LLM's checkpoint format, as ModelOpt writes it, would not describe this model, None if it does."""
    if info.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return f"{info.architecture}: refused by ModelOpt 0.37, which TensorRT-LLM 1.2 carries; use the unified export"
    if info.rope_scaling is not None:
        return f"rope_scaling {info.rope_scaling}: ModelOpt drops it from config.json"
    return None


def describe_format(form: Format) -> str:
    """Return a format in the words of KV_ALGORITHMS: `fp8_e4m3 per_tensor`."""
    rotated = f" rotation={form.rotation}" if form.rotation != "none" else ""
    return f"{form.dtype} {form.granularity}{'' if form.symmetric else ' asymmetric'}{rotated}"
