"""transformers' own causal language model, as both engines of backend=torch use it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.core.kv import KVPolicy, KVScales, KVShape


def shape_for(model: Any, policy: KVPolicy) -> KVShape:
    """The model's shape; UserError when the policy does not fit it."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, head_dim)
    policy.check_shape(shape)
    return shape


def scales_for(policy: KVPolicy, shape: KVShape, scales: KVScales | None) -> KVScales:
    """Static scales, which may be None when no side of the policy is static; UserError when they do not fit."""
    if scales is None:
        scales = KVScales(layers=tuple({} for _ in range(shape.layers)))
    scales.check(policy, shape, "scales")
    return scales


def hidden_states(model: Any, attention: str, ids: Tensor, positions: Tensor, **passed: Any) -> Tensor:
    """The last layer's normalized hidden states, (B, S, hidden), of ids and positions (B, S).

    `attention` is a name registered with transformers' AttentionInterface; `passed` reaches it as keyword arguments.
    """
    config = model.config
    own = config._attn_implementation
    config._attn_implementation = attention
    try:
        out = model.model(input_ids=ids, position_ids=positions, use_cache=False, **passed)
    finally:
        config._attn_implementation = own
    hidden: Tensor = out.last_hidden_state
    return hidden


def refuse_options(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Raise for what a model asks of its attention and would not get."""
    for name in ("sliding_window", "softcap", "s_aux", "head_mask"):
        if options.get(name) is not None:
            raise RuntimeError(f"layer {module.layer_idx}: {name}={options[name]} of the attention would be lost")
