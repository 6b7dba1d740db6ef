"""A tiny random model of every family that kvgate serves. Each is built, exported and run in seconds."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
WINDOW = {"sliding_window": 40}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"rope_scaling": LINEAR} | WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "rope_scaling": LINEAR} | WINDOW,
    "qwen3": {"head_dim": 96, "rope_scaling": {"rope_type": "yarn"} | SCALED},
    "phi3": {"partial_rotary_factor": 0.5} | WINDOW,
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True} | WINDOW,
    "starcoder2": WINDOW,
    "glm4": {"head_dim": 80},
    "qwen2_moe": {"use_sliding_window": True, "shared_expert_intermediate_size": 32} | EXPERTS | WINDOW,
    "qwen3_moe": {"head_dim": 192} | EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 128, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0} | WINDOW,
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 1, "num_hidden_layers": 6} | WINDOW,
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2} | WINDOW,
}
"""Family -> configuration values that differ from SIZE."""


def family_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family.

    Biases, norms and sinks are random too: if they were zeros and ones, losing them would go unnoticed.
    """
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **(SIZE | MODELS[family] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "bias" in name or name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()
