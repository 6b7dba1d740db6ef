"""The supported decoder families, with the properties that determine the cache and the attention: one entry per family.

All other properties come from transformers: the computation outside of attention, the tensors (stages/checkpoints/loading.py
builds the model on the meta device), and the attention's parameters (the nodes of an export).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NO_ROPE_INTERVAL = 4
"""transformers' default of no_rope_layer_interval."""

Slides = Callable[[Mapping[str, Any], int], bool]
"""Function (config, layer) -> whether the layer has a sliding window if layer_types is missing."""


def _all_but_every(period: int) -> Slides:
    return lambda config, layer: bool((layer + 1) % int(config.get("sliding_window_pattern") or period))


def _from_max_window_layers(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= int(config["max_window_layers"])


LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Linear layers per decoder layer of the families whose weights can be quantized; the LM head is never quantized."""


@dataclass(frozen=True)
class Family:
    """One model_type of transformers."""

    architecture: str
    windows: Literal["none", "every", "listed"] = "none"
    """Layers with a sliding window: none, all if sliding_window is set, or the layers listed in layer_types."""
    slides: Slides = lambda *_: True
    """Rule that replaces layer_types in a `listed` family if it is missing."""
    uses_flag: bool = False
    """Whether sliding windows also need use_sliding_window=true."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for missing keys of config.json, limited to the keys that kvgate reads."""
    features: tuple[str, ...] = ()
    """Attention features other than windows: a key of config.json, or a name if all models of the family have the feature."""
    local_base: str | None = None
    """Key of config.json for the rotary base of sliding layers, in families whose layer types differ in their rotation."""
    quantizable: bool = False
    """Whether kvgate can quantize the weights: the linear layers are LINEARS, and ModelOpt's exports support the family."""

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.defaults, **config}


_QWEN: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE: Mapping[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
SOFTCAP, SINKS = "attn_logit_softcapping", "sinks"

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", quantizable=True),
    "mistral": Family(
        "MistralForCausalLM", "every", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, quantizable=True
    ),
    "qwen2": Family("Qwen2ForCausalLM", "listed", _from_max_window_layers, uses_flag=True, defaults=_QWEN, quantizable=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "listed",
        _from_max_window_layers,
        uses_flag=True,
        defaults={**_QWEN, "head_dim": 128},
        quantizable=True,
    ),
    "phi3": Family("Phi3ForCausalLM", "every"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family(
        "Olmo3ForCausalLM", "listed", _all_but_every(4), defaults={"sliding_window": 4096}, local_base="rope_theta"
    ),
    "granite": Family("GraniteForCausalLM"),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "listed",
        lambda config, layer: not has_positions(config, layer),
        uses_flag=True,
        defaults={"num_key_value_heads": 4},
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", "every", defaults={"num_key_value_heads": 2}),
    "glm4": Family("Glm4ForCausalLM", defaults={"num_key_value_heads": 2, "head_dim": 128}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "listed",
        lambda config, layer: bool((layer + 1) % 2) and layer < config["max_window_layers"],
        uses_flag=True,
        defaults={**_QWEN_MOE, "num_key_value_heads": 16},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "every", uses_flag=True, defaults={"num_key_value_heads": 4, "sliding_window": 4096}
    ),
    "mixtral": Family("MixtralForCausalLM", "every", defaults={"num_key_value_heads": 8}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "listed",
        _all_but_every(2),
        defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, SOFTCAP: 50.0},
        features=(SOFTCAP,),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "listed",
        _all_but_every(6),
        defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        local_base="rope_local_base_freq",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "listed",
        _all_but_every(2),
        defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        features=(SINKS,),
    ),
}

ARCHITECTURES = {family.architecture: kind for kind, family in FAMILIES.items()}
"""Class -> the model_type that makes transformers load it."""

STATE = "some layers keep a state of constant size instead of keys and values"
OTHER_CACHES = {
    "kv_lora_rank": "a token has one latent vector for all heads (MLA) instead of keys and values",
    **dict.fromkeys(
        (
            "attn_layer_period",
            "hybrid_override_pattern",
            "full_attention_interval",
            "mamba_d_state",
            "state_size",
            "linear_num_key_heads",
            "attn_type_list",
        ),
        STATE,
    ),
    "num_kv_shared_layers": "some layers use the keys and values of other layers",
    "cross_attention_layers": "some layers keep keys and values of another input",
    "is_encoder_decoder": "a decoder layer also keeps keys and values of the encoder",
    "block_configs": "layers have shapes of their own",
    "use_bidirectional_attention": "tokens attend to later tokens, as in an encoder, so earlier tokens cannot be cached",
}
"""Key in config.json of a model whose cache kvgate does not support -> the reason."""

LARGER_MODEL = ("vision_config", "audio_config", "text_config")
"""Keys of config.json of models that contain a decoder, such as models that also take images or audio."""


def has_positions(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of SmolLM3 rotates its queries and keys."""
    layers = config.get("no_rope_layers")
    if layers is not None:
        return bool(layers[layer])
    return bool((layer + 1) % int(config.get("no_rope_layer_interval") or NO_ROPE_INTERVAL))
