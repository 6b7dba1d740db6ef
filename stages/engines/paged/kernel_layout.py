"""Translates a KVPolicy to the attention kernels' CacheLayout of each layer, or says why the kernels do not hold the layer.

The kernels serve backend=torch on CUDA, which needs all layers, and the TensorRT plugin, which takes the layers that they
hold. No torch: policies are checked before anything is loaded.
"""

from dataclasses import dataclass

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVShape, Side
from plugins.kv_attention.kernels.variants import GROUP_LIMIT
from plugins.kv_attention.layout import (
    CODES,
    HEAD_DIMS,
    KEY_DTYPES,
    CacheLayout,
    SideLayout,
)

POLICY_FIX = "set backend.device=cpu, or choose another policy"
MODEL_FIX = "set backend.device=cpu"


@dataclass(frozen=True)
class KernelRefusal:
    """The reason why the kernels do not hold a layer's cache."""

    key: str
    """The configuration's key, `kv.key.rotation`."""
    value: object
    reason: str
    fix: str = POLICY_FIX
    """What a user of backend=torch can do."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.reason}"


@dataclass(frozen=True)
class KernelLayers:
    """A model's layers: those that the kernels hold, and the others."""

    layouts: dict[int, CacheLayout]
    """Layer -> its layout, for each layer that the kernels hold. Layers of equal formats have equal layouts."""
    refusals: dict[int, KernelRefusal]
    """Layer -> the reason why the kernels do not hold it."""


def choose_layers(policy: KVPolicy, shape: KVShape, q_heads: int) -> KernelLayers:
    """Return the layouts of the layers that the kernels hold, and the reasons for the others."""
    layers = KernelLayers({}, {})
    for layer in range(shape.layers):
        layout = layer_layout(policy, shape, layer, q_heads)
        if isinstance(layout, KernelRefusal):
            layers.refusals[layer] = layout
        else:
            layers.layouts[layer] = layout
    return layers


def layer_layout(policy: KVPolicy, shape: KVShape, layer: int, q_heads: int) -> CacheLayout | KernelRefusal:
    """Return the layout of one layer's cache, or why the kernels do not hold it."""
    if policy.window is not None:
        reason = "the CUDA kernels read one copy of a token, so window must be null"
        return KernelRefusal("kv.window.tokens", policy.window.tokens, reason)
    if policy.eviction is not None:
        reason = "the CUDA kernels read every page of a sequence, so eviction must be null"
        return KernelRefusal("kv.eviction.window_tokens", policy.eviction.window_tokens, reason)
    sides: dict[Side, SideLayout] = {}
    for side, form in policy.sides(layer).items():
        refusal = _refuse_format(policy.format_key(side, layer), side, form)
        if refusal is not None:
            return refusal
        sides[side] = SideLayout(form.dtype, form.granularity, form.group_size)  # type: ignore[arg-type]  # just narrowed
    refusal = _refuse_model(shape, layer, q_heads)
    if refusal is not None:
        return refusal
    key, value = sides[Side.KEY], sides[Side.VALUE]
    if value.group_size is not None and shape.head_dim % value.group_size:
        reason = f"does not divide the model's head_dim {shape.head_dim}"
        return KernelRefusal(f"{policy.format_key(Side.VALUE, layer)}.group_size", value.group_size, reason)
    return CacheLayout(shape.kv_heads, shape.head_dim, key, value, policy.sink_tokens, policy.recent_tokens)


def check_kernels(policy: KVPolicy, shape: KVShape, q_heads: int) -> list[CacheLayout]:
    """Return the layout of every layer's cache."""
    layers = choose_layers(policy, shape, q_heads)
    if layers.refusals:
        # A format is named before the model: it is what the user can choose.
        refusal = min(layers.refusals.values(), key=lambda refusal: refusal.fix != POLICY_FIX)
        raise UserError(f"{refusal}; {refusal.fix}")
    return list(layers.layouts.values())


def _refuse_format(key: str, side: Side, form: Format) -> KernelRefusal | None:
    """The reason why the kernels do not hold one side's format, None when they do. `key` is the configuration's key of it."""
    if form.rotation != "none":
        return KernelRefusal(f"{key}.rotation", form.rotation, "the CUDA kernels do not rotate")
    if not form.symmetric:
        return KernelRefusal(f"{key}.symmetric", "false", "the CUDA kernels have no zero points")
    plural, dtypes = ("keys", KEY_DTYPES) if side.is_key else ("values", tuple(CODES))
    if form.dtype not in dtypes:
        return KernelRefusal(f"{key}.dtype", form.dtype, f"the CUDA kernels hold {plural} as {_listed(dtypes)}")
    if form.code.oracle_only:
        return KernelRefusal(f"{key}.arithmetic", form.arithmetic, "the CUDA kernels have kvgate's alone")
    granularities = CODES[form.dtype].granularities
    if form.granularity not in granularities:
        reason = f"the CUDA kernels hold {form.dtype} {_listed(granularities)}"
        return KernelRefusal(f"{key}.granularity", form.granularity, reason)
    return _refuse_groups(key, form)


def _refuse_groups(key: str, form: Format) -> KernelRefusal | None:
    """The reason why the kernels do not hold the groups of a format whose dtype and granularity they hold."""
    sizes = CODES[form.dtype].group_sizes  # type: ignore[index]  # its caller narrowed
    if form.granularity == "per_group" and form.group_size not in sizes:
        return KernelRefusal(f"{key}.group_size", form.group_size, f"the CUDA kernels take {_listed(sizes)}")
    if form.block_scale == "4over6":
        return KernelRefusal(f"{key}.block_scale", form.block_scale, "the CUDA kernels choose a block's scale by its maximum")
    return None


def _refuse_model(shape: KVShape, layer: int, q_heads: int) -> KernelRefusal | None:
    """The reason why the kernels do not hold the model's heads or its layer's window, None when they do."""
    slides = shape.window(layer)
    if slides is not None:
        reason = "with the CUDA kernels every layer attends to all tokens"
        return KernelRefusal("model.path: sliding_window", slides, reason, MODEL_FIX)
    if shape.head_dim not in HEAD_DIMS:
        return KernelRefusal("model.path: head_dim", shape.head_dim, f"the CUDA kernels take {_listed(HEAD_DIMS)}", MODEL_FIX)
    if q_heads > GROUP_LIMIT * shape.kv_heads:
        reason = f"the CUDA kernels take up to {GROUP_LIMIT} for each of the {shape.kv_heads} KV heads"
        return KernelRefusal("model.path: num_attention_heads", q_heads, reason, MODEL_FIX)
    return None


def _listed(values: tuple[object, ...]) -> str:
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last
