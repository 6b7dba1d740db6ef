"""The kernels as torch operators, `kvgate::plan`, `kvgate::decode_attention` and `kvgate::append`, for tracing and CUDA graphs.

A cache is passed as its tensors, named and shaped as in plugins/kv_attention/layout.py; the operators read its format from
their types and shapes. Launches depend on shapes alone: no operator reads the contents of a tensor on the host, waits for the
device, or allocates anything but its output, the work list and the partial sums.

The operators are registered for CUDA, and for the CPU in a process that interprets kernels (TRITON_INTERPRET=1).

Shapes: L layers, B sequences, Hq query heads, H KV heads, D head_dim, N pages, P columns of the page table, W elements and
g scales of a token, M exact buffers, E exact tokens, W programs over the pages of a KV head, Y all its programs.

Example:
    out = decode_attention(query, key_new, value_new, page_table, lengths, **cache, scaling=head_dim**-0.5)
"""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.checks import INPUTS
from plugins.kv_attention.kernels.variants import GROUP_LIMIT, decode_variant, work_rows
from plugins.kv_attention.layout import NVFP4_GROUP, CacheLayout, Dtype, SideLayout

DEVICES = ("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",)

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
    work: Tensor | None = None,
    sequences: Tensor | None = None,
) -> Tensor:
    """Run the attention of one decode step of one layer.

    Args:
        query: (B, Hq, D) float32, float16 or bfloat16.
        key_new: (B, H, D), keys of the current tokens, of the same three types.
        value_new: (B, H, D), values of the current tokens.
        page_table: (B, P) int32. Entries beyond a sequence's length are not read.
        lengths: (B) int32, tokens before the current one.
        key_pool: (N, H, 64, W).
        value_pool: (N, H, 64, W).
        key_scale: (1) or (H) float32, of static keys.
        value_scale: (1) or (H) float32, of static values and of nvfp4's.
        key_scale_pool: (N, H, 64, 1) float16, of dynamic keys.
        value_scale_pool: (N, H, 64, g) float16, of dynamic values; float8_e4m3fn, of nvfp4's.
        key_exact: (M, H, E, D) float16, with exact tokens: the sinks, then the recent tokens.
        value_exact: (M, H, E, D) float16, with exact tokens.
        exact_slots: (B) int32, with exact tokens: the exact buffer of each sequence.
        sink_tokens: How many of the E exact tokens are sinks.
        scaling: Factor of the scores before the softmax.
        work: (Y, 5) int32, as `plan` makes it of these lengths; None for a list of this call's own, which is one more launch.
        sequences: (B, 4) int32, which comes with `work`.

    Returns:
        (B, Hq, D) in the type of query.

    Raises:
        ValueError: The tensors do not form a cache.
    """
    cache = _cache(
        key_pool=key_pool, value_pool=value_pool, key_scale=key_scale, value_scale=value_scale,
        key_scale_pool=key_scale_pool, value_scale_pool=value_scale_pool, key_exact=key_exact, value_exact=value_exact,
    )  # fmt: skip
    layout = layout_of(query.shape[-1], cache, sink_tokens)
    if work is None or sequences is None:
        programs = default_programs(layout, query, page_table, scaling)
        exact = {"sink_tokens": sink_tokens, "recent_tokens": layout.recent_tokens}
        made = launch.plan_decode(lengths, programs=programs, **exact)
    else:
        made = launch.Plan(work, sequences)
    return launch.decode_attention(
        layout,
        query,
        key_new,
        value_new,
        cache,
        page_table=page_table,
        lengths=lengths,
        plan=made,
        scaling=scaling,
        exact_slots=exact_slots,
    )


@decode_attention.register_fake
def _(query: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("kvgate::plan", mutates_args=(), device_types=DEVICES)
def plan(lengths: Tensor, programs: int, sink_tokens: int = 0, recent_tokens: int = 0) -> tuple[Tensor, Tensor]:
    """Make the work list of a decode step from the real lengths, for all layers with these exact tokens.

    Args:
        lengths: (B) int32, tokens before the current one.
        programs: W, programs over the pages of a KV head; see default_programs.
        sink_tokens: Exact tokens at the beginning of a sequence.
        recent_tokens: Exact tokens at its end.

    Returns:
        work (Y, 5) and sequences (B, 4) int32, Y = W, and B more with exact tokens.
    """
    made = launch.plan_decode(lengths, programs=programs, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
    return made.work, made.sequences


@plan.register_fake
def _(lengths: Tensor, programs: int, sink_tokens: int = 0, recent_tokens: int = 0) -> tuple[Tensor, Tensor]:
    rows = work_rows(programs, len(lengths), exact=sink_tokens + recent_tokens > 0)
    return lengths.new_empty(rows, 5), lengths.new_empty(len(lengths), 4)


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

    The tensors of the cache are those of decode_attention with a leading dimension L; static scales are (L, 1) or (L, H). All
    layers share page_table, which must reach the position, lengths and exact_slots. No two sequences may write to the same
    page and row. The lengths are not changed. Nothing is written of a sequence whose length is negative: what a captured step
    refuses, and rows that fill up a batch.

    Args:
        key_new: (L, B, H, D) float32, float16 or bfloat16.
        value_new: (L, B, H, D), of the same three types.
        page_table: (B, P) int32; (B, 1) is the page of that position, so that rows may be tokens of one sequence.
        lengths: (B) int32, tokens before the new one, or -1.
        key_pool: (L, N, H, 64, W), written.
        value_pool: (L, N, H, 64, W), written.
        key_scale: (L, 1) or (L, H) float32, of static keys.
        value_scale: (L, 1) or (L, H) float32, of static values and of nvfp4's.
        key_scale_pool: (L, N, H, 64, 1) float16, of dynamic keys, written.
        value_scale_pool: (L, N, H, 64, g) float16, of dynamic values, or float8_e4m3fn, of nvfp4's, written.
        key_exact: (L, M, H, E, D) float16, with exact tokens, written.
        value_exact: (L, M, H, E, D) float16, with exact tokens, written.
        exact_slots: (B) int32, with exact tokens: the exact buffer m of each row, or -1 - m of a token that is none of the
            newest, which is kept there as a sink alone. No two rows may write to one slot.
        sink_tokens: How many of the E exact tokens are sinks.

    Raises:
        ValueError: The tensors do not form a cache. Nothing has been written then.
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
    """The cache's tensors by name, without absent ones."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _first_layer(name: str, tensor: Tensor) -> Tensor:
    if not tensor.dim() or not len(tensor):
        raise ValueError(f"{name} must begin with the dimension of the layers, got {tuple(tensor.shape)}")
    return tensor[0]


def layout_of(head_dim: int, cache: Mapping[str, Tensor], sink_tokens: int) -> CacheLayout:
    """Return the layout that the tensors of one layer have.

    int4 with one scale per token is `per_token`, also where its policy names a group size. Only what tells the format is
    checked here; the launch checks all shapes.

    Args:
        head_dim: D.
        cache: Tensors of the layer by name.
        sink_tokens: How many of the exact tokens are sinks.

    Raises:
        ValueError: No layout has such tensors.
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
        dtype = "nvfp4" if scale_pool is not None and scale_pool.dtype == torch.float8_e4m3fn else "int4"
    if dtype == "nvfp4":
        return SideLayout(dtype, "per_group", NVFP4_GROUP)
    if scale is not None:
        return SideLayout(dtype, "per_tensor" if scale.numel() == 1 else "per_head")
    if scale_pool is None:
        return SideLayout(dtype)
    groups = scale_pool.shape[-1]
    return SideLayout(dtype, "per_token") if groups == 1 else SideLayout(dtype, "per_group", head_dim // max(1, groups))


def default_programs(layout: CacheLayout, query: Tensor, page_table: Tensor, scaling: float) -> int:
    """Return the programs over the pages of a KV head that fill the query's device, from shapes alone.

    Args:
        layout: Format of the cache.
        query: (B, Hq, D); of it type, shape and device matter.
        page_table: (B, P).
        scaling: Factor of the scores before the softmax.
    """
    batch, max_pages = page_table.shape[0], page_table.shape[-1]
    if query.device.type == "cpu":
        return launch.choose_programs(batch, layout.kv_heads, max_pages, sm_count=launch.INTERPRETED_PROGRAMS, resident=1)
    resident = _resident(layout, query, scaling)
    return launch.choose_programs(batch, layout.kv_heads, max_pages, sm_count=launch.sm_count(query.device), resident=resident)


def _resident(layout: CacheLayout, query: Tensor, scaling: float) -> int:
    """Programs of the launched variant that an SM runs at once; 1 for a query that the launch will refuse."""
    if query.dim() != 3 or query.dtype not in INPUTS or not 1 <= query.shape[1] // layout.kv_heads <= GROUP_LIMIT:
        return 1
    group, dtype = query.shape[1] // layout.kv_heads, str(query.dtype).removeprefix("torch.")
    sm = launch.compute_capability(query.device)
    return decode_variant(layout, group=group, query_dtype=dtype, scaling=scaling, sm=sm).resident
