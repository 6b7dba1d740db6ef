"""Limits of ModelOpt's official exports: the KV policies and models that they can describe. ModelOpt is not imported.

The quantize stage does not write an export that would be wrong. A backend that needs this export refuses the policy.
"""

from stages.checkpoints.description import CheckpointInfo
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy

UNIFIED_HF_KV = ("FP8",)
TENSORRT_LLM_KV = ("FP8", "INT8")
"""Cache algorithms that each export can declare. The declared one applies to all keys and values, with scales by layer."""


def export_refusal(policy: KVPolicy, algorithms: tuple[str, ...]) -> str | None:
    """Return why an export cannot declare the policy; None if it can. `algorithms`: for example UNIFIED_HF_KV."""
    reason = single_format_refusal(policy)
    if reason is not None:
        return reason
    if policy.key.dtype == "fp16" or algorithm(policy.key) in algorithms:
        return None
    problem = "the export has no name for this format and would refuse, drop or mislabel it"
    return f"{describe_format(policy.key)} keys and values: {problem}"


def single_format_refusal(policy: KVPolicy) -> str | None:
    """Return why a cache with a single format for all keys, values and tokens cannot hold a policy; None if it can."""
    if policy.exact_tokens:
        return f"{policy.sink_tokens} sink and {policy.recent_tokens} recent exact tokens are not supported by this engine"
    if policy.window is not None:
        return f"other formats for the last {policy.window.tokens} tokens are not supported by this engine"
    if policy.eviction is not None:
        return f"eviction.window_tokens={policy.eviction.window_tokens}: evictions are not supported by this engine"
    formats = {name: describe_format(form) for name, form in policy.formats}
    if len(set(formats.values())) > 1:
        return (
            f"{', '.join(f'{name} {text}' for name, text in formats.items())}: its cache has one type for all keys and values"
        )
    return None


def supporting_backend(policy: KVPolicy) -> str:
    """Return the settings of a CPU backend that supports the policy, for the error message of another backend."""
    heavy = policy.eviction is not None and policy.eviction.heavy_tokens
    reference = heavy or any(form.code.reference_only for _, form in policy.formats)
    return "backend=torch backend.device=cpu" if reference else "backend=onnxruntime"


def tensorrt_llm_refusal(info: CheckpointInfo) -> str | None:
    """Return why ModelOpt's checkpoint for TensorRT-LLM would not describe this model; None if it does."""
    if info.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return f"{info.architecture}: refused by ModelOpt 0.37, which TensorRT-LLM 1.2 requires; use the unified export"
    if info.shape.windows:
        return "sliding-window layers: no test covers them in this export"
    if info.rope_scaling is not None:
        return f"rope_scaling {info.rope_scaling}: ModelOpt drops it from config.json"
    return None


def algorithm(form: Format) -> str | None:
    """Return ModelOpt's algorithm name for a cache with this format for keys and values; None if it has no name."""
    plain = form.static_granularity == "per_tensor" and form.symmetric and form.rotation == "none"
    return form.code.modelopt_name if plain else None


def describe_format(form: Format) -> str:
    """Return a description of a format, for example `fp8_e4m3 per_tensor`."""
    rotated = f" rotation={form.rotation}" if form.rotation != "none" else ""
    library = f" arithmetic={form.arithmetic}" if form.arithmetic != "kvgate" else ""
    return f"{form.dtype} {form.granularity}{'' if form.symmetric else ' asymmetric'}{rotated}{library}"
