"""The quantized cache on a GPU: the pools of all layers, and one append launch per layout.

Shapes: l layers of one layout, L layers, N pages, M exact buffers, E exact tokens, H KV heads, D head_dim, W elements of a
token, B rows of a step, P columns (pages) of the page table, T tokens in a sequence's cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout, SideLayout
from stages.core.errors import UserError
from stages.core.records import StoredCopy
from stages.engines.paged.sequences import PageAllocator, SequencePages
from stages.engines.staging import saturated_product
from stages.policies.policy import PAGE_TOKENS, Side
from stages.policies.scales import KVScales

FIRST_COLUMNS = 16
"""Initial columns (pages) of a step's page table: 1,024 tokens."""


@dataclass
class LayerGroup:
    """Layers that share a cache layout, and their tensors."""

    layout: CacheLayout
    layers: list[int]
    first: int
    """Index of the group's first layer in a step's new keys and values, which are in the order of the groups."""
    paged: dict[str, Tensor]
    """Pools (l, N, H, 64, W) by the names of CacheLayout.pools: `key_pool`, ..."""
    exact: dict[str, Tensor]
    """Exact tokens `key_exact` and `value_exact`, (l, M, H, E, D)."""
    scales: dict[str, Tensor]
    """Static scales `key_scale` and `value_scale`, (l, 1 or H)."""
    read_scales: dict[str, Tensor] = field(default_factory=dict)
    """Key scale that attention reads after the must-fail control corrupted it; tokens are still stored with `scales`."""
    fault: Tensor | None = None
    """Factor () of the must-fail control on the keys' stored scales, or on unscaled keys."""

    @property
    def faulted_array(self) -> str:
        """Name of the paged array that `fault` multiplies."""
        return "key_scale_pool" if self.layout.key.dynamic else "key_pool"

    def attention_tensors(self, i: int) -> dict[str, Tensor]:
        """Return the tensors that attention reads in the i-th layer. Their addresses are constant until `moves` changes."""
        return {name: tensor[i] for name, tensor in (self.paged | self.exact | self.scales | self.read_scales).items()}

    def apply_fault(self, pages: Tensor, slots: Tensor, stored: Tensor) -> None:
        """Multiply the scales or numbers at `slots` of `pages` by the group's fault, if `stored` is true."""
        assert self.fault is not None
        array = self.paged[self.faulted_array]
        # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
        array[:, pages, :, slots] = saturated_product(array[:, pages, :, slots], torch.where(stored, self.fault, 1.0))


class KernelCache(SequencePages):
    """The caches of all sequences.

    The tensors stay on the device. The host tracks only the pages and the length of every sequence.
    """

    def __init__(self, layouts: Sequence[CacheLayout], scales: KVScales, device: torch.device) -> None:
        """Create an empty cache from the layouts of all layers (as check_kernels returns them) and their static scales."""
        super().__init__()
        self.device = device
        self.moves = 0
        """Number of changes that invalidated captured graphs: tensors were reallocated, or page tables were widened."""
        self.columns = FIRST_COLUMNS
        """Columns (pages) of a step's page table."""
        self.groups: list[LayerGroup] = []
        self.places: list[tuple[LayerGroup, int]] = []
        """For every layer, its group and its index in that group."""
        by_layout: dict[CacheLayout, list[int]] = {}
        for layer, layout in enumerate(layouts):
            by_layout.setdefault(layout, []).append(layer)
        for layout, layers in by_layout.items():
            static = {
                f"{side}_scale": torch.tensor([scales.layers[n][side].scale for n in layers], device=device)
                for side, stored in ((Side.KEY, layout.key), (Side.VALUE, layout.value))
                if stored.has_static_scales
            }
            self.groups.append(LayerGroup(layout, layers, sum(len(group.layers) for group in self.groups), {}, {}, static))
        by_layer = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        self.places = [by_layer[layer] for layer in range(len(layouts))]
        self._enlarge(self.pages, 0)
        self._enlarge(self.buffers, 0)

    def widen_page_table(self, handles: Sequence[int]) -> None:
        needed = max(len(self.sequences[handle].pages) for handle in handles)
        if needed > self.columns:
            self.columns = 1 << (needed - 1).bit_length()
            self.moves += 1

    def append(self, keys: Tensor, values: Tensor, page_table: Tensor, positions: Tensor, exact_slots: Tensor) -> None:
        """Store one token for each row that has a position, without waiting for the device.

        Keys and values are (L, B, H, D), with layers in the order of the groups. Rows that are not stored have position -1. The
        caller must store the first row if it stores any row.
        """
        for group in self.groups:
            cache, layers = group.paged | group.exact | group.scales, slice(group.first, group.first + len(group.layers))
            launch.append(group.layout, keys[layers], values[layers], cache, page_table, positions, exact_slots=exact_slots)
        faulted = [group for group in self.groups if group.fault is not None]
        if faulted:
            # Rows that are not stored repeat the first row, so that two rows never write different numbers to the same slot.
            row = torch.where(positions >= 0, torch.arange(len(positions), device=self.device), 0)
            place = positions[row].clamp(min=0).long()
            pages = page_table[row, (place // PAGE_TOKENS).clamp(max=page_table.shape[1] - 1)].long()
            for group in faulted:
                group.apply_fault(pages, place % PAGE_TOKENS, stored=positions[0] >= 0)

    @property
    def recent_tokens(self) -> int:
        """Number of newest tokens of a sequence that are kept exact, the same in all layers."""
        return self.groups[0].layout.recent_tokens

    def by_layer(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reorder rows (L, ...) from the order of the groups to the order of the layers."""
        return rows[[group.first + i for group, i in self.places]]

    def stored(self, handle: int, layer: int) -> dict[Side, StoredCopy]:
        """Return a sequence's stored codes of a layer, with the static scales that attention uses."""
        sequence = self.sequences[handle]
        group, i = self.places[layer]
        tensors, pages = group.attention_tensors(i), torch.tensor(sequence.pages, dtype=torch.int64, device=self.device)

        def held(name: str, kind: type[np.generic]) -> npt.NDArray[Any] | None:
            if name not in group.paged:
                return None
            by_head = tensors[name][pages].transpose(0, 1).flatten(1, 2)[:, : sequence.length]
            return by_head.contiguous().view(torch.uint8).cpu().numpy().view(kind)

        def copy(side: Side, form: SideLayout) -> StoredCopy:
            codes, static = held(f"{side}_pool", np.uint8), tensors.get(f"{side}_scale")
            assert codes is not None
            scale = held(f"{side}_scale_pool", np.uint8 if form.layer_scale else np.float16)
            return StoredCopy(0, codes, scale, None, None if static is None else static.cpu().numpy().reshape(-1, 1, 1), None)

        return {Side.KEY: copy(Side.KEY, group.layout.key), Side.VALUE: copy(Side.VALUE, group.layout.value)}

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the key scales that attention reads, or keys that have no scale, of stored and future tokens."""
        for group in self.groups:
            if "key_scale" in group.scales:
                group.read_scales["key_scale"] = group.read_scales.get("key_scale", group.scales["key_scale"]) * factor
            else:
                group.fault = torch.tensor(factor, device=self.device) * (1.0 if group.fault is None else group.fault)
                group.paged[group.faulted_array].copy_(saturated_product(group.paged[group.faulted_array], factor))
        self.moves += 1

    def _numbered_by(self, allocator: PageAllocator) -> Iterator[Tensor]:
        if allocator is not self.window_pages:
            for group in self.groups:
                for layers in (group.paged if allocator is self.pages else group.exact).values():
                    yield from layers

    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Double the number of pages or exact buffers if memory allows it, else grow to `needed`; a failure changes nothing."""
        kind: Literal["paged", "exact"] = "paged" if allocator is self.pages else "exact"
        for capacity in sorted({max(needed, 2 * allocator.capacity), needed}, reverse=True):
            try:
                larger = [self._allocate_larger(group, kind, capacity) for group in self.groups]
            except torch.OutOfMemoryError:
                continue  # the exception frees the new tensors before the next attempt
            for group, tensors in zip(self.groups, larger, strict=True):
                setattr(group, kind, tensors)
            allocator.grow(capacity)
            self.moves += 1
            return
        unit = f"pages of {PAGE_TOKENS} tokens" if kind == "paged" else "exact buffers (one per sequence)"
        raise UserError(
            f"backend.device={self.device.type}: its memory is too small: {needed} {unit} are needed, "
            f"in addition to the present {allocator.capacity} while they are copied; run fewer or shorter sequences at once"
        )

    def _allocate_larger(self, group: LayerGroup, kind: Literal["paged", "exact"], capacity: int) -> dict[str, Tensor]:
        """Return larger tensors (l, *shape) of a group for `capacity` pages or buffers, with the old contents copied."""
        old = group.paged if kind == "paged" else group.exact
        specs = group.layout.pools(capacity) if kind == "paged" else group.layout.exact_buffers(capacity)
        new = {}
        for name, (dtype, shape) in specs.items():
            new[name] = torch.zeros(len(group.layers), *shape, dtype=getattr(torch, dtype), device=self.device)
            if name in old:
                new[name][:, : old[name].shape[1]] = old[name]
        return new
