"""Translates a KVPolicy to the attention kernels' CacheLayout of each layer, or to the reason why a layer is unsupported.

backend=torch on CUDA needs kernels for all layers. The TensorRT plugin uses kernels for the supported layers only. This module
does not import torch, because policies are checked before anything is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plugins.kv_attention.layout import CODES, HEAD_DIMS, KEY_DTYPES, CacheLayout, SideLayout
from plugins.kv_attention.variants import GROUP_LIMIT
from stages.core.errors import UserError
from stages.policies.formats import either
from stages.policies.policy import KVPolicy, KVShape, Side

MODEL_PREFIX = "model.path: "
"""Start of a refusal that is caused by the model, not by the policy."""


@dataclass(frozen=True)
class KernelLayers:
    layouts: dict[int, CacheLayout]
    """Layout by supported layer. Layers with equal formats have equal layouts."""
    refusals: dict[int, str]
    """Message with the configuration key, its value and the reason, by unsupported layer."""


def choose_layers(policy: KVPolicy, shape: KVShape, q_heads: int) -> KernelLayers:
    layers = KernelLayers({}, {})
    for layer in range(shape.layers):
        refusal = next(_refusals(policy, shape, layer, q_heads), None)
        if refusal is not None:
            layers.refusals[layer] = refusal
            continue
        sides: Any = {side: (form.dtype, form.granularity, form.group_size) for side, form in policy.sides(layer).items()}
        key, value = SideLayout(*sides[Side.KEY]), SideLayout(*sides[Side.VALUE])
        exact = policy.sink_tokens, policy.recent_tokens
        layers.layouts[layer] = CacheLayout(shape.kv_heads, shape.head_dim, key, value, *exact)
    return layers


def check_kernels(policy: KVPolicy, shape: KVShape, q_heads: int) -> list[CacheLayout]:
    """Return the layouts of all layers. Raises UserError if a layer is unsupported."""
    layers = choose_layers(policy, shape, q_heads)
    if layers.refusals:
        # Report a format before the model, because the user can choose the format.
        refusal = min(layers.refusals.values(), key=lambda refusal: refusal.startswith(MODEL_PREFIX))
        choice = "" if refusal.startswith(MODEL_PREFIX) else ", or choose another policy"
        raise UserError(f"{refusal}; set backend.device=cpu{choice}")
    return list(layers.layouts.values())


def _refusals(policy: KVPolicy, shape: KVShape, layer: int, q_heads: int) -> Iterator[str]:
    """Yield the reasons why the kernels do not support a layer: first reasons in its formats, then in the model."""
    if policy.window is not None:
        tokens = policy.window.tokens
        yield f"kv.window.tokens={tokens}: the CUDA kernels do not support kv.window; set kv.window=null"
    if policy.eviction is not None:
        tokens = policy.eviction.window_tokens
        yield f"kv.eviction.window_tokens={tokens}: the CUDA kernels do not support kv.eviction; set kv.eviction=null"
    for side, form in policy.sides(layer).items():
        key = policy.format_key(side, layer)
        if form.rotation != "none":
            yield f"{key}.rotation={form.rotation}: the CUDA kernels do not rotate"
        if not form.symmetric:
            yield f"{key}.symmetric=false: the CUDA kernels have no zero points"
        plural, dtypes = ("keys", KEY_DTYPES) if side.is_key else ("values", tuple(CODES))
        codes = next((codes for dtype, codes in CODES.items() if dtype == form.dtype and dtype in dtypes), None)
        if codes is None:
            yield f"{key}.dtype={form.dtype}: the CUDA kernels hold {plural} as {either(dtypes)}"
            return
        if form.code.reference_only:
            yield f"{key}.arithmetic={form.arithmetic}: the CUDA kernels implement only arithmetic=kvgate"
        if form.granularity not in codes.granularities:
            yield f"{key}.granularity={form.granularity}: the CUDA kernels hold {form.dtype} {either(codes.granularities)}"
        elif form.group_size is not None and form.group_size not in codes.group_sizes:
            yield f"{key}.group_size={form.group_size}: the CUDA kernels take {either(codes.group_sizes)}"
        elif shape.head_dim % (form.group_size or 1):
            yield f"{key}.group_size={form.group_size}: does not divide the model's head_dim {shape.head_dim}"
    yield from _refuse_model(shape, layer, q_heads)


def _refuse_model(shape: KVShape, layer: int, q_heads: int) -> Iterator[str]:
    window = shape.window(layer)
    if window is not None:
        yield f"{MODEL_PREFIX}sliding_window={window}: with the CUDA kernels every layer attends to all tokens"
    if shape.head_dim not in HEAD_DIMS:
        yield f"{MODEL_PREFIX}head_dim={shape.head_dim}: the CUDA kernels take {either(HEAD_DIMS)}"
    if q_heads > GROUP_LIMIT * shape.kv_heads:
        limit = f"up to {GROUP_LIMIT} for each of the {shape.kv_heads} KV heads"
        yield f"{MODEL_PREFIX}num_attention_heads={q_heads}: the CUDA kernels take {limit}"
