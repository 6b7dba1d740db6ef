"""Static scales from a model's own keys and values, by the max rule of calibration.

The pipeline's scales come from ModelOpt (`stages/quantize`). Benchmarks need the same rule for dozens of policies without
ModelOpt's quantizers, and for formats that ModelOpt does not calibrate. Legend: H KV heads, T tokens, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.scales import KVScales, SideScales
from pipeline.formats.spec import MIN_SCALE
from stages.engines.oracle.formats import hadamard

SHARED_AXES = {"per_tensor": (0, 1, 2), "per_head": (1, 2), "per_channel": (1,)}
"""Axes of (H, T, D) that share a static scale, by granularity."""


CachedStates = tuple[dict[str, Tensor], ...]
"""Keys (after RoPE) and values of every layer over some texts, each (H, T, D) float32."""


@torch.no_grad()
def cached_states(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> CachedStates:
    """Return the keys and values that the unquantized model caches for texts of token ids."""
    layers: list[dict[str, list[Tensor]]] = [{"key": [], "value": []} for _ in range(model.config.num_hidden_layers)]
    for text in texts:
        cache = DynamicCache()
        model.model(torch.tensor([list(text)]), past_key_values=cache, use_cache=True)
        for states, layer in zip(layers, cache.layers, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            states["key"].append(layer.keys[0].float())
            states["value"].append(layer.values[0].float())
    return tuple({side: torch.cat(parts, dim=1) for side, parts in states.items()} for states in layers)


def calibrated_scales(x_HTD: Tensor, form: Format) -> SideScales:
    """Return the static scales, and the zeros of an asymmetric format, with which no number of x_HTD saturates.

    An uncalibrated format has a scale of 1.
    """
    if form.scale == "uncalibrated":
        return SideScales(scale=(1.0,))
    if form.rotation == "hadamard":
        x_HTD = x_HTD @ hadamard(x_HTD.shape[-1])
    axes = SHARED_AXES[form.static_granularity or form.granularity]
    if form.symmetric:
        return SideScales(scale=_floats(x_HTD.abs().amax(axes) / form.largest))
    low, high = x_HTD.amin(axes), x_HTD.amax(axes)
    return SideScales(scale=_floats((high - low) / form.code.levels), zero=tuple(low.flatten().tolist()))


def _floats(scale: Tensor) -> tuple[float, ...]:
    """Scales in head-major order, at least MIN_SCALE so that constant numbers do not divide by zero."""
    return tuple(scale.clamp(min=MIN_SCALE).flatten().tolist())


def kv_scales(policy: KVPolicy, states: CachedStates) -> KVScales:
    """Return the scales of every static side of `policy`."""
    layers: list[dict[Side, SideScales]] = []
    for number, tensors in enumerate(states):
        sides = policy.sides(number).items()
        layers.append({side: calibrated_scales(tensors[side.base], form) for side, form in sides if form.has_static_scales})
    return KVScales(layers=tuple(layers))
