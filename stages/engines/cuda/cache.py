"""The quantized cache on a GPU: pools of all layers, and one append for all layers of a layout.

Shapes: l layers of one format, L layers, N pages, M exact buffers, E exact tokens, H KV heads, D head_dim, W elements of a
token, B rows of a step, P pages of a row of the table, T tokens in a sequence's cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, Side
from pipeline.core.records import StoredCopy
from pipeline.core.scales import KVScales
from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout, SideLayout
from stages.engines.paged.sequences import PageAllocator, SequencePages
from stages.engines.staging import scaled

FIRST_COLUMNS = 16
"""Pages of a row of a step's table at first: 1,024 tokens."""


@dataclass
class LayerGroup:
    """Layers whose caches have one layout, and their tensors."""

    layout: CacheLayout
    layers: list[int]
    first: int
    """Place of its first layer among the new keys and values of a step, which are in the order of the groups."""
    paged: dict[str, Tensor]
    """`key_pool`, ... (l, N, H, 64, W), as CacheLayout.pools says."""
    exact: dict[str, Tensor]
    """`key_exact`, `value_exact` (l, M, H, E, D)."""
    scales: dict[str, Tensor]
    """`key_scale`, `value_scale` (l, 1 | H) of static sides."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """Those of `scales` that are read with other numbers than tokens are stored with: the must-fail control corrupted them."""
    faults: dict[str, Tensor] = field(default_factory=dict)
    """The must-fail control's factors (l, 1, H, 1, 1) on stored scales, or on numbers that have none, by paged array."""

    def to_read(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the i-th layer that attention reads; their addresses stay the same until `moves` changes."""
        return {name: tensor[i] for name, tensor in (self.paged | self.exact | self.scales | self.read).items()}

    def apply_faults(self, pages: Tensor, slots: Tensor, stored: Tensor) -> None:
        """Multiply the scales, or the numbers, at some places by the group's faults; leave them where `stored` is false."""
        for name, factors in self.faults.items():
            factor = factors[None, :, 0, :, 0]
            array = self.paged[name]
            # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
            array[:, pages, :, slots] = scaled(array[:, pages, :, slots], torch.where(stored, factor, 1.0))


class KernelCache(SequencePages):
    """The caches of all sequences.

    Kernels alone read and write what is on the device. The host knows which sequence has which pages, and how long it is.
    """

    def __init__(self, layouts: Sequence[CacheLayout], scales: KVScales, device: torch.device) -> None:
        """`layouts` are those of all layers, as check_kernels returns them; `scales` hold their static scales."""
        super().__init__()
        self.device = device
        self.moves = 0
        """Counts the times that a captured graph no longer fits: its tensors are elsewhere, or its tables too narrow."""
        self.columns = FIRST_COLUMNS
        """Pages of a row of a step's page table."""
        self.groups: list[LayerGroup] = []
        self.places: list[tuple[LayerGroup, int]] = []
        """For each layer, the group that it belongs to and its index in that group."""
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

    def widen(self, handles: Sequence[int]) -> None:
        """Let rows of a step's page table reach all pages of these sequences."""
        needed = max(len(self.sequences[handle].pages) for handle in handles)
        if needed > self.columns:
            self.columns = 1 << (needed - 1).bit_length()
            self.moves += 1

    def append(self, keys: Tensor, values: Tensor, page_table: Tensor, positions: Tensor, exact_slots: Tensor) -> None:
        """Store one token of every row that has a position, which is the first or no row; nothing here waits for the device.

        Keys and values are (L, B, H, D), layers in the order of the groups. Rows that are not stored have the position -1.
        """
        for group in self.groups:
            cache, own = group.paged | group.exact | group.scales, slice(group.first, group.first + len(group.layers))
            launch.append(group.layout, keys[own], values[own], cache, page_table, positions, exact_slots=exact_slots)
        if any(group.faults for group in self.groups):
            # Rows that are not stored do again what the first row does, so that no two rows write different numbers to a place.
            row = torch.where(positions >= 0, torch.arange(len(positions), device=self.device), 0)
            place = positions[row].clamp(min=0).long()
            pages = page_table[row, (place // PAGE_TOKENS).clamp(max=page_table.shape[1] - 1)].long()
            for group in self.groups:
                group.apply_faults(pages, place % PAGE_TOKENS, stored=positions[0] >= 0)

    @property
    def recent_tokens(self) -> int:
        """The newest tokens of a sequence that are kept exact, the same in all layers."""
        return self.groups[0].layout.recent_tokens

    def by_layer(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows that are in the order of the groups, (L, ...), in the order of the layers."""
        return rows[[group.first + i for group, i in self.places]]

    def stored(self, handle: int, layer: int) -> dict[Side, StoredCopy]:
        """Return what a sequence's pages hold of a layer, and the static scales that attention reads it with."""
        sequence = self.sequences[handle]
        group, i = self.places[layer]
        tensors, pages = group.to_read(i), torch.tensor(sequence.pages, dtype=torch.int64, device=self.device)

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

    def corrupt_scale(self, side: Side, factor: float, layer: int | None, head: int | None) -> None:
        """Multiply the scales that the pools are read with, of stored and of later tokens; the codes stay right."""
        for group in self.groups:
            chosen = [layer is None or one == layer for one in group.layers]
            if not any(chosen):
                continue
            static, dynamic = f"{side}_scale", (group.layout.key if side.is_key else group.layout.value).dynamic
            if static in group.scales:
                scales = group.read.get(static, group.scales[static])
                whole = head is None or scales.shape[1] == 1
                group.read[static] = scales * self._factors(chosen, scales.shape[1], factor, None if whole else head)
            else:
                array = f"{side}_scale_pool" if dynamic else f"{side}_pool"
                paged = group.paged[array]
                factors = self._factors(chosen, paged.shape[2], factor, head)[:, None, :, None, None]
                group.faults[array] = group.faults[array] * factors if array in group.faults else factors
                paged.copy_(scaled(paged, factors))
        self.moves += 1

    def _factors(self, chosen: Sequence[bool], heads: int, factor: float, head: int | None) -> Tensor:
        """`factor` of one head or all in the layers that are chosen, else 1: (l, heads)."""
        factors = torch.ones(len(chosen), heads, device=self.device)
        for i in (i for i, one in enumerate(chosen) if one):
            factors[i, slice(None) if head is None else head] = factor
        return factors

    def _numbered_by(self, allocator: PageAllocator) -> Iterator[Tensor]:
        for group in self.groups if allocator is not self.window_pages else ():
            for layers in (group.paged if allocator is self.pages else group.exact).values():
                yield from layers

    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Make room for twice as many pages or exact buffers as there are where memory allows that, for `needed` otherwise.

        All new tensors are allocated before one replaces an old one: a cache that cannot grow stays as it is.
        """
        kind: Literal["paged", "exact"] = "paged" if allocator is self.pages else "exact"
        for capacity in sorted({max(needed, 2 * allocator.capacity), needed}, reverse=True):
            try:
                larger = [self._larger(group, kind, capacity) for group in self.groups]
            except torch.OutOfMemoryError:
                continue  # the new tensors so far are freed with the exception, before the next attempt
            for group, tensors in zip(self.groups, larger, strict=True):
                setattr(group, kind, tensors)
            allocator.grow(capacity)
            self.moves += 1
            return
        what = f"pages of {PAGE_TOKENS} tokens" if kind == "paged" else "exact buffers, one a sequence,"
        raise UserError(
            f"backend.device={self.device.type}: its memory is too small: {needed} {what} are needed, "
            f"beside the {allocator.capacity} that are moved; run fewer or shorter sequences at once"
        )

    def _larger(self, group: LayerGroup, kind: Literal["paged", "exact"], capacity: int) -> dict[str, Tensor]:
        """New tensors (l, *shape) of a group for `capacity` pages or buffers, with what is stored copied to their beginning."""
        old = group.paged if kind == "paged" else group.exact
        specs = group.layout.pools(capacity) if kind == "paged" else group.layout.exact_buffers(capacity)
        new = {}
        for name, (dtype, shape) in specs.items():
            new[name] = torch.zeros(len(group.layers), *shape, dtype=getattr(torch, dtype), device=self.device)
            if name in old:
                new[name][:, : old[name].shape[1]] = old[name]
        return new
