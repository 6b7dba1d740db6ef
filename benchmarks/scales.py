"""Static scales from a model's own keys and values, by the pipeline's rule (`stages/quantize/scales.py`).

The pipeline measures extremes with ModelOpt's quantizers. Benchmarks need the scales of dozens of policies, and of formats that
ModelOpt does not calibrate. Legend: H KV heads, T tokens, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.scales import KVScales, SideScales
from stages.engines.oracle.formats import rotated
from stages.quantize.scales import Extremes, calibrated

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
    heads, _, dim = x_HTD.shape
    count = form.static_scales(heads, dim)
    if form.scale == "uncalibrated":
        return SideScales(scale=(1.0,) * count)
    x_HTD = rotated(x_HTD, form)
    low, high, amax = (tuple(x.flatten().tolist()) for x in (x_HTD.amin(1), x_HTD.amax(1), x_HTD.abs().amax(1)))
    return calibrated(form, count, Extremes(low, high, amax))


def kv_scales(policy: KVPolicy, states: CachedStates) -> KVScales:
    """Return the scales of every static side of `policy`."""
    layers: list[dict[Side, SideScales]] = []
    for number, tensors in enumerate(states):
        sides = policy.sides(number).items()
        layers.append({side: calibrated_scales(tensors[side.base], form) for side, form in sides if form.has_static_scales})
    return KVScales(layers=tuple(layers))
