"""Static scales from a model's own keys and values: plain ranges, as a calibration with the max rule finds them.

The pipeline's scales come from ModelOpt (`stages/quantize`). A report over dozens of policies wants the same rule without
its machinery, and for formats that it does not measure. Legend: H KV heads, T tokens, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from pipeline.core.formats import MIN_SCALE, Format
from pipeline.core.kv import KVPolicy, KVScales, Side, SideScales
from stages.engines.oracle.formats import hadamard

SHARED_AXES = {"per_tensor": (0, 1, 2), "per_head": (1, 2), "per_channel": (1,)}
"""Axes of (H, T, D) over which a static scale is shared."""


@dataclass(frozen=True)
class Observed:
    """Keys (after RoPE) and values of every layer over some texts, each (H, T, D) float32."""

    layers: tuple[dict[str, Tensor], ...]

    @property
    def largest_key(self) -> float:
        return max(layer["key"].abs().max().item() for layer in self.layers)


@torch.no_grad()
def observe(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> Observed:
    """What the unquantized model would store for `texts`, token ids each."""
    layers: list[dict[str, list[Tensor]]] = [{"key": [], "value": []} for _ in range(model.config.num_hidden_layers)]
    for text in texts:
        cache = DynamicCache()
        model.model(torch.tensor([list(text)]), past_key_values=cache, use_cache=True)
        for found, layer in zip(layers, cache.layers, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            found["key"].append(layer.keys[0].float())
            found["value"].append(layer.values[0].float())
    return Observed(tuple({side: torch.cat(parts, dim=1) for side, parts in found.items()} for found in layers))


def measured(x_HTD: Tensor, form: Format) -> SideScales:
    """Scales, and zeros of an asymmetric format, with which no number of x_HTD saturates; 1.0 where not calibrated."""
    if form.scale == "uncalibrated":
        return SideScales(scale=(1.0,))
    if form.rotation == "hadamard":
        x_HTD = x_HTD @ hadamard(x_HTD.shape[-1])
    axes = SHARED_AXES[form.granularity]
    if form.symmetric:
        return SideScales(scale=_floats(x_HTD.abs().amax(axes) / form.code.limit))
    low, high = x_HTD.amin(axes), x_HTD.amax(axes)
    return SideScales(scale=_floats((high - low) / form.code.levels), zero=tuple(low.flatten().tolist()))


def _floats(scale: Tensor) -> tuple[float, ...]:
    """Head-major; what is constant still divides by something."""
    return tuple(scale.clamp(min=MIN_SCALE).flatten().tolist())


def kv_scales(policy: KVPolicy, observed: Observed) -> KVScales:
    """The scales of every static side of `policy`."""
    layers: list[dict[Side, SideScales]] = []
    for number, tensors in enumerate(observed.layers):
        sides = policy.sides(number).items()
        layers.append({name: measured(tensors[name.base], form) for name, form in sides if form.static})
    return KVScales(layers=tuple(layers))
