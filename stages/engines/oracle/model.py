"""transformers' own causal language model, as both engines of backend=torch use it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from pipeline.checkpoint.quantized import ROUNDED
from pipeline.checkpoint.windows import layer_windows
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.scales import KVScales


def shape_for(model: Any, policy: KVPolicy) -> KVShape:
    """Return the model's shape. Raises UserError when the policy does not fit it."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = int(config.num_hidden_layers)
    windows = layer_windows(Path(config._name_or_path), config.to_dict(), layers)
    shape = KVShape(layers, config.num_key_value_heads, head_dim, windows if any(windows) else ())
    policy.check_shape(shape)
    return shape


def scales_for(policy: KVPolicy, shape: KVShape, scales: KVScales | None) -> KVScales:
    """Return the static scales of a policy; `scales` may be None when no side of it is static.

    Raises UserError when they do not fit the policy and the shape.
    """
    if scales is None:
        scales = KVScales(layers=tuple({} for _ in range(shape.layers)))
    scales.check(policy, shape, "scales")
    return scales


def round_inputs(model: Any) -> None:
    """Let the linear layers that config.json names round each token of their input to INT8, by its largest magnitude."""

    def rounded(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        scale = (inputs[0].abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (inputs[0] / scale).round() * scale

    for name in getattr(model.config, ROUNDED, ()):
        model.get_submodule(name).register_forward_pre_hook(rounded)


@dataclass(frozen=True)
class LayerInput:
    """What reaches a layer of a model: the layers before it are computed already."""

    layer: int
    states: Tensor
    """(B, S, hidden)."""


class _Known(torch.nn.Module):
    """In place of a layer, or of all: what comes out."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


@contextmanager
def captured_input(model: Any, layer: int) -> Iterator[list[LayerInput]]:
    """Give a list that gets the input of a layer when the model runs."""
    found: list[LayerInput] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(LayerInput(layer, args[0] if args else kwargs["hidden_states"]))

    hook = model.model.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def hidden_states(
    model: Any, attention: str, ids: Tensor, positions: Tensor, known: LayerInput | None = None, **options: Any
) -> Tensor:
    """Run the model's layers.

    Args:
        model: transformers' causal language model.
        attention: A name that is registered with transformers' AttentionInterface.
        ids: Token ids (B, S).
        positions: Their positions (B, S).
        known: The input of a layer, from which the model runs on instead of from the token ids.
        options: Keyword arguments that the attention gets.

    Returns:
        The last layer's normalized hidden states, (B, S, hidden).
    """
    config, layers = model.config, model.model.layers
    configured = config._attn_implementation
    config._attn_implementation = attention
    if known is not None:
        # Layers keep their numbers: a model finds windows and rotary bases by them, and scales what it embeds.
        before = [_Known(known.states) for _ in range(known.layer)]
        model.model.layers = torch.nn.ModuleList([*before, *layers[known.layer :]])
    try:
        out = model.model(input_ids=ids, position_ids=positions, use_cache=False, **options)
    finally:
        config._attn_implementation, model.model.layers = configured, layers
    hidden: Tensor = out.last_hidden_state
    return hidden


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's attention is asked to do besides scaled products."""

    window: int | None = None
    """The latest tokens that it attends to, the attending one included; None for all."""
    softcap: float | None = None
    """c of scores that become c * tanh(scores / c) before the softmax; None leaves them."""
    sinks: Tensor | None = None
    """(H, G): learned scores, one a query head, that take their share of the softmax and have no value."""

    def cap(self, scores: Tensor) -> Tensor:
        """Cap scores in place, and return them."""
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


def asked_of(module: torch.nn.Module, kv_heads: int, options: Mapping[str, Any]) -> LayerAttention:
    """Return what a model asks of a layer's attention, the options of transformers' attention interface.

    Qwen2-MoE does not hand on its window, which its mask applies.
    """
    if options.get("head_mask") is not None:
        raise RuntimeError(f"layer {module.layer_idx}: head_mask={options['head_mask']} of the attention would be lost")
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    sinks = options.get("s_aux")
    return LayerAttention(window or None, options.get("softcap"), None if sinks is None else sinks.view(kv_heads, -1))


def no_mask(*_: Any, **__: Any) -> None:
    """transformers' mask interface: no mask, since the attention that is registered beside it masks by itself."""


def refuse_options(module: torch.nn.Module, kv_heads: int, options: Mapping[str, Any]) -> None:
    """Raise RuntimeError for what a model asks of its attention and an attention of plain products would ignore."""
    asked = asked_of(module, kv_heads, options)
    if asked != LayerAttention():
        raise RuntimeError(f"layer {module.layer_idx}: {asked} of the attention would be lost")


def head(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits (..., V) of normalized hidden states (..., hidden), as the model scales and caps them."""
    layers = model.model
    model.model = _Known(MoeModelOutputWithPast(last_hidden_state=hidden))
    try:
        logits: Tensor = model(inputs_embeds=hidden, use_cache=False, output_router_logits=False).logits
    finally:
        model.model = layers
    return logits
