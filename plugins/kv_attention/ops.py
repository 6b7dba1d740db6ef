"""The kernels as operators of torch, `kvgate::decode_attention` and `kvgate::append`: they trace, and CUDA graphs hold them.

A cache is given by its tensors, named and shaped as plugins/kv_attention/layout.py says. Their types and shapes tell its
format, so that `**` of a dict of them is all it takes. Launches depend on shapes alone: no operator looks at the contents of
a tensor, waits for the device, or allocates anything but its output and the partial sums of the splits.

Registered for CUDA, and for the CPU in a process whose kernels are interpreted (TRITON_INTERPRET=1).

Shapes: L layers, B sequences, Hq query heads, H KV heads, D head_dim, N pages, P pages of a row of the table, W elements and
g scales of a token, M exact buffers, E exact tokens.
"""

import functools
from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.kernels.variants import GROUP_LIMIT, decode_variant
from plugins.kv_attention.layout import CacheLayout, Dtype, SideLayout

DEVICES = ("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",)

RESIDENT = 8
"""Programs of one warp of the decode kernel that one SM runs at once, of which splits are chosen where no variant is known."""

INTERPRETED_PROGRAMS = 4
"""The interpreter runs one program after the other: a few splits, so that there is something to join."""

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.int8: "int8",
}


@torch.library.custom_op("kvgate::decode_attention", mutates_args=(), device_types=DEVICES)
def decode_attention(
    query: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_scale_pool: Tensor | None = None,
    value_scale_pool: Tensor | None = None,
    key_exact: Tensor | None = None,
    value_exact: Tensor | None = None,
    exact_slots: Tensor | None = None,
    sink_tokens: int = 0,
    scaling: float = 1.0,
    splits: int | None = None,
) -> Tensor:
    """One decode step of one layer: (B, Hq, D) in the type of query.

    query (B, Hq, D), key_new and value_new (B, H, D) of the current tokens, float32, float16 or bfloat16; page_table (B, P)
    and lengths (B) int32, where lengths counts the tokens before the current one: entries of the table beyond it are not read.
    key_pool, value_pool (N, H, 64, W); static sides have key_scale, value_scale (1) or (H) float32, dynamic ones
    key_scale_pool (N, H, 64, 1), value_scale_pool (N, H, 64, g) float16; with exact tokens, key_exact and value_exact
    (M, H, E, D) float16 and exact_slots (B) int32, of whose E tokens the first `sink_tokens` are sinks and the others recent.

    Softmax of scores times `scaling`. `splits` of the pages run side by side; None chooses them for this device.
    Raises ValueError for tensors that are no cache.
    """
    cache = _cache(
        key_pool=key_pool, value_pool=value_pool, key_scale=key_scale, value_scale=value_scale,
        key_scale_pool=key_scale_pool, value_scale_pool=value_scale_pool, key_exact=key_exact, value_exact=value_exact,
    )  # fmt: skip
    layout = layout_of(query.shape[-1], cache, sink_tokens)
    if splits is None:
        resident = _resident(layout, query, scaling)
        splits = default_splits(query.device, query.shape[0], layout.kv_heads, page_table.shape[-1], resident)
    return launch.decode_attention(
        layout,
        query,
        key_new,
        value_new,
        cache,
        page_table=page_table,
        lengths=lengths,
        scaling=scaling,
        splits=splits,
        exact_slots=exact_slots,
    )


@decode_attention.register_fake
def _(query: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "kvgate::append",
    mutates_args=("key_pool", "value_pool", "key_scale_pool", "value_scale_pool", "key_exact", "value_exact"),
    device_types=DEVICES,
)
def append(
    key_new: Tensor,
    value_new: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_scale_pool: Tensor | None = None,
    value_scale_pool: Tensor | None = None,
    key_exact: Tensor | None = None,
    value_exact: Tensor | None = None,
    exact_slots: Tensor | None = None,
    sink_tokens: int = 0,
) -> None:
    """Quantize one token of every sequence and write it at position lengths[b], in place, for all layers in one launch.

    key_new and value_new (L, B, H, D) float32, float16 or bfloat16; the tensors of the cache as decode_attention takes them,
    each with a first dimension of L more, static scales (L, 1) or (L, H). page_table (B, P), which must reach the position,
    lengths (B) and exact_slots (B) serve all layers. No two sequences may write to the same page and row. The lengths stay
    as they are. Raises ValueError for tensors that are no cache.
    """
    cache = _cache(
        key_pool=key_pool, value_pool=value_pool, key_scale=key_scale, value_scale=value_scale,
        key_scale_pool=key_scale_pool, value_scale_pool=value_scale_pool, key_exact=key_exact, value_exact=value_exact,
    )  # fmt: skip
    layout = layout_of(key_new.shape[-1], {name: _first_layer(name, tensor) for name, tensor in cache.items()}, sink_tokens)
    launch.append(
        layout,
        key_new,
        value_new,
        cache,
        page_table=page_table,
        lengths=lengths,
        exact_slots=exact_slots,
    )


@append.register_fake
def _(*_: object, **__: object) -> None:
    return None


def _cache(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are there."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _first_layer(name: str, tensor: Tensor) -> Tensor:
    if not tensor.dim() or not len(tensor):
        raise ValueError(f"{name} must begin with the dimension of the layers, got {tuple(tensor.shape)}")
    return tensor[0]


def layout_of(head_dim: int, cache: Mapping[str, Tensor], sink_tokens: int) -> CacheLayout:
    """The layout of one layer's tensors. int4 with one scale a token is `per_token`, whatever its group size is called.

    Raises ValueError where there is none; that all shapes are those of the layout is checked at the launch.
    """
    for name, tensor in cache.items():
        if tensor.dim() != (1 if name in ("key_scale", "value_scale") else 4):
            raise ValueError(f"{name} has the wrong number of dimensions, got {tuple(tensor.shape)} in one layer")
    exact = cache["key_exact"].shape[2] if "key_exact" in cache else 0
    key, value = (_side(head_dim, cache, side) for side in ("key", "value"))
    return CacheLayout(cache["key_pool"].shape[1], head_dim, key, value, sink_tokens, exact - sink_tokens)


def _side(head_dim: int, cache: Mapping[str, Tensor], side: str) -> SideLayout:
    pool, scale, scale_pool = (cache.get(f"{side}_{name}") for name in ("pool", "scale", "scale_pool"))
    assert pool is not None
    if pool.dtype not in DTYPES:
        raise ValueError(f"{side}_pool must be one of {', '.join(map(str, DTYPES))}, got {pool.dtype}")
    dtype = DTYPES[pool.dtype]
    if dtype == "int8" and pool.shape[-1] == head_dim // 2:
        dtype = "int4"
    if scale is not None:
        return SideLayout(dtype, "per_tensor" if scale.numel() == 1 else "per_head")
    if scale_pool is None:
        return SideLayout(dtype)
    groups = scale_pool.shape[-1]
    return SideLayout(dtype, "per_token") if groups == 1 else SideLayout(dtype, "per_group", head_dim // max(1, groups))


def _resident(layout: CacheLayout, query: Tensor, scaling: float) -> int:
    """Programs that an SM runs at once, of the variant that is launched; the launch says what is wrong with a query."""
    if query.dim() != 3 or query.dtype not in launch.INPUTS or not 1 <= query.shape[1] // layout.kv_heads <= GROUP_LIMIT:
        return RESIDENT
    group, dtype = query.shape[1] // layout.kv_heads, str(query.dtype).removeprefix("torch.")
    sm = launch.compute_capability(query.device)
    return decode_variant(layout, group=group, query_dtype=dtype, scaling=scaling, sm=sm).resident


def default_splits(device: torch.device, batch: int, kv_heads: int, max_pages: int, resident: int = RESIDENT) -> int:
    """Splits that fill this device, from shapes alone. resident: of the variant, Variant.resident."""
    if device.type == "cpu":
        return launch.choose_splits(batch, kv_heads, max_pages, sm_count=INTERPRETED_PROGRAMS, resident=1)
    return launch.choose_splits(batch, kv_heads, max_pages, sm_count=_sm_count(device), resident=resident)


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
