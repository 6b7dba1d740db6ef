"""Checks of tensors before a launch: kernels compute addresses from shapes, and the append writes there.

They look at shapes, types, strides and addresses only, never at contents, so that a CUDA graph can capture a launch.

Shapes: B sequences, P columns of the page table.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.kv_attention.layout import CacheLayout, Spec

ALIGNMENT = 16
"""Bytes. Kernels load pools in words of this size; the compiler is told that pools begin at a multiple of it."""

INPUTS = (torch.float32, torch.float16, torch.bfloat16)
"""Accepted types of queries and of new keys and values."""


def check_inputs(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in INPUTS:
            raise ValueError(f"{name} must be one of {', '.join(map(str, INPUTS))}, got {tensor.dtype}")
        check_device(name, tensor, device)


def check_attended(layout: CacheLayout, query: Tensor, key_new: Tensor, value_new: Tensor, rows: str) -> None:
    """Check queries (rows, Hq, D) with the keys and values (rows, H, D) of their tokens; messages say `rows`."""
    if query.dim() != 3 or query.shape[2] != layout.head_dim or query.shape[1] % layout.kv_heads:
        raise ValueError(f"query must be ({rows}, G * {layout.kv_heads}, {layout.head_dim}), got {tuple(query.shape)}")
    new = {"key_new": key_new, "value_new": value_new}
    check_inputs({"query": query} | new, query.device)
    for name, tensor in new.items():
        check_shape(name, tensor, (len(query), layout.kv_heads, layout.head_dim))


def check_cache(layout: CacheLayout, cache: Mapping[str, Tensor], leading: tuple[int, ...], device: torch.device) -> None:
    """Check that the cache has exactly the layout's tensors, each (*leading, *shape), contiguous and aligned.

    The number of pages is taken from key_pool, the number of exact buffers from key_exact.
    """
    counts = [
        cache[name].shape[len(leading)] if name in cache and cache[name].dim() > len(leading) else 0
        for name in ("key_pool", "key_exact")
    ]
    specs: dict[str, Spec] = layout.pools(counts[0]) | layout.exact_buffers(counts[1]) | layout.static_scales()
    if cache.keys() != specs.keys():
        names = " and ".join(", ".join(sorted(tensors)) or "nothing" for tensors in (specs, cache))
        raise ValueError(f"the cache's tensors must be those of the layout; wanted and got: {names}")
    for name, (dtype, shape) in specs.items():
        tensor = cache[name]
        if tensor.dtype != getattr(torch, dtype):
            raise ValueError(f"{name} must be torch.{dtype}, got {tensor.dtype}")
        check_shape(name, tensor, (*leading, *shape))
        check_contiguous(name, tensor)
        check_device(name, tensor, device)
        if name.endswith("_pool") and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} must begin at a multiple of {ALIGNMENT} bytes, got {tensor.data_ptr():#x}: clone() it")


def check_tables(
    layout: CacheLayout,
    batch: int,
    page_table: Tensor,
    lengths: Tensor,
    exact_slots: Tensor | None,
    device: torch.device,
) -> None:
    if layout.exact_tokens and exact_slots is None:
        raise ValueError(f"exact_slots must be given: the layout keeps {layout.exact_tokens} exact tokens")
    if page_table.dim() != 2 or len(page_table) != batch:
        raise ValueError(f"page_table must be ({batch}, P), a row of every sequence, got {tuple(page_table.shape)}")
    check_index("page_table", page_table, tuple(page_table.shape), device)
    check_index("lengths", lengths, (batch,), device)
    if exact_slots is not None:
        check_index("exact_slots", exact_slots, (batch,), device)


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a tensor that kernels read as int32."""
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be torch.int32, got {tensor.dtype}")
    check_shape(name, tensor, shape)
    check_contiguous(name, tensor)
    check_device(name, tensor, device)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        strides, shape = tensor.stride(), tuple(tensor.shape)
        raise ValueError(f"{name} must be contiguous, got strides {strides} of shape {shape}: make it so with contiguous()")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the other tensors are, got {tensor.device}")
