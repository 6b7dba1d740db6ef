"""Checks of the tensors of a launch: types, shapes, strides, addresses and devices, never contents."""

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from plugins.kv_attention.kernels.variants import Compute
from plugins.kv_attention.layout import CacheLayout, Dims, misfit

ALIGNMENT = 16
"""Alignment in bytes of a page's rows and of a pool's address. The compiler relies on both."""

INT32 = ("int32",)
Wanted = tuple[tuple[str, ...], Dims]
"""Types that a tensor may have, as torch names them, and its dimensions."""


def check_launch(
    layout: CacheLayout,
    tensors: Mapping[str, Tensor | None],
    cache: Mapping[str, Tensor],
    rows: str = "B",
    layers: tuple[str, ...] = (),
) -> None:
    """Check the tensors of a launch, by name; `lengths` is always present.

    Args:
        layout: Format of the cache.
        tensors: Every tensor except the cache's; None for an absent one.
        cache: Exactly the layout's tensors.
        rows: Letter of the new tokens.
        layers: Letter of a leading dimension of the cache and the new tokens, if several layers are launched at once.

    Raises:
        ValueError: A tensor has a type, shape, stride, address or device that the kernels do not read.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    new: Wanted = (get_args(Compute), (*layers, rows, layout.kv_heads, layout.head_dim))
    known: dict[str, Wanted] = {
        "query": (get_args(Compute), (rows, "Hq", layout.head_dim)),
        "key_new": new,
        "value_new": new,
        "page_table": (INT32, ("B", "P")),
        "lengths": (INT32, ("B",)),
        "exact_slots": (INT32, ("B",)),
        "work": (INT32, ("Y", 5)),
        "sequences": (INT32, ("B", 4)),
        "query_starts": (INT32, (given["lengths"].numel() + 1,)),
    }
    held: dict[str, Wanted] = {name: ((kind,), (*layers, *dims)) for name, (kind, dims) in layout.any_size().items()}
    if cache.keys() != held.keys():
        names = " and ".join(", ".join(sorted(tensors)) or "nothing" for tensors in (held, cache))
        raise ValueError(f"the cache must have the layout's tensors; wanted and got: {names}")
    if layout.exact_tokens and "exact_slots" not in given:
        raise ValueError(f"exact_slots must be given: the layout keeps {layout.exact_tokens} exact tokens")
    check({**given, **cache}, {name: known[name] for name in given} | held)
    if "query" in given and given["query"].shape[1] % layout.kv_heads:
        raise ValueError(f"query must have a multiple of the {layout.kv_heads} KV heads, got {given['query'].shape[1]}")


def check(tensors: Mapping[str, Tensor], wanted: Mapping[str, Wanted]) -> None:
    """Check tensors against the wanted types and dimensions. All but the new tokens must be contiguous, and pools aligned."""
    sizes: dict[str, int] = {}
    device = next(iter(tensors.values())).device
    for name, (types, dims) in wanted.items():
        tensor = tensors[name]
        if tensor.dtype not in [getattr(torch, kind) for kind in types]:
            one_of = "one of " if len(types) > 1 else ""
            raise ValueError(f"{name} must be {one_of}{', '.join(f'torch.{kind}' for kind in types)}, got {tensor.dtype}")
        wrong = misfit(name, tensor.shape, dims, sizes)
        if wrong is not None:
            raise ValueError(wrong)
        if types != get_args(Compute) and not tensor.is_contiguous():
            strides, shape = tensor.stride(), tuple(tensor.shape)
            raise ValueError(f"{name} must be contiguous, got strides {strides} of shape {shape}: make it so with contiguous()")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, where the other tensors are, got {tensor.device}")
        if name.endswith("_pool") and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} must begin at a multiple of {ALIGNMENT} bytes, got {tensor.data_ptr():#x}: clone() it")
