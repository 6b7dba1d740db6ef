"""The paged pool of the attention kernels: it grows with the sequences, and one append launch per layout stores new tokens.

Shapes: l layers of one layout, L layers, N pages, M exact buffers, H KV heads, D head_dim, B rows of a step, P columns (pages)
of the page table.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout
from stages.core.errors import UserError
from stages.engines.paged.sequences import PageAllocator
from stages.engines.paged.torch_pool import LayerGroup, TorchPool
from stages.engines.staging import saturated_product
from stages.policies.policy import PAGE_TOKENS, SIDES, KVPolicy, KVShape
from stages.policies.scales import KVScales

FIRST_COLUMNS = 16
"""Initial columns (pages) of a step's page table: 1,024 tokens."""
MAX_PAGES = 1 << 30
"""No limit: the memory of the device ends first."""


class KernelCache(TorchPool):
    """A pool that grows on demand. `moves` also counts other changes that invalidate captured graphs."""

    alignment = 16  # the append needs arrays of successive layers without gaps

    def __init__(
        self, layouts: Sequence[CacheLayout], policy: KVPolicy, shape: KVShape, scales: KVScales, device: torch.device
    ) -> None:
        """Create an empty cache. `layouts`: the layouts of all layers, as check_kernels returns them."""
        super().__init__(policy, shape, MAX_PAGES, device)
        self.layouts = layouts
        self.columns = FIRST_COLUMNS
        """Columns (pages) of a step's page table."""
        self._layers = [torch.tensor(group.layers, device=device) for group in self.groups]
        """Layers of every group, on the device."""
        self._written_scales = [self._static_scales(group, scales) for group in self.groups]
        """Static scales `key_scale` and `value_scale` (l, 1 or H) that new tokens are stored with, by group."""

    def _static_scales(self, group: LayerGroup, scales: KVScales) -> dict[str, Tensor]:
        layout = self.layouts[group.layers[0]]
        return {
            f"{side}_scale": torch.tensor([scales.layers[layer][side].scale for layer in group.layers], device=self.device)
            for side, form in zip(SIDES, (layout.key, layout.value), strict=True)
            if form.has_static_scales
        }

    def widen_page_table(self, handles: Sequence[int]) -> None:
        needed = max(len(self.sequences[handle].pages) for handle in handles)
        if needed > self.columns:
            self.columns = 1 << (needed - 1).bit_length()
            self.moves += 1

    def layer(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's arrays by name. Their addresses are constant until `moves` changes."""
        (group,) = (group for group in self.groups if layer in group.layers)
        return {name: _with_kernel_type(self.tensors[f"{name}.{layer}"]) for name in group.tensors}

    def append_rows(
        self,
        keys: Tensor,
        values: Tensor,
        page_table: Tensor,
        positions: Tensor,
        exact_slots: Tensor,
        faults: Mapping[str, float],
    ) -> None:
        """Store one token for each row that has a position, without waiting for the device.

        Keys and values are (L, B, H, D). Rows that are not stored have position -1. The caller must store the first row if it
        stores any row. `faults`: array -> factor on the written numbers.
        """
        for group, layers, scales in zip(self.groups, self._layers, self._written_scales, strict=True):
            cache = {name: _with_kernel_type(stack) for name, stack in group.tensors.items()} | scales
            layout = self.layouts[group.layers[0]]
            launch.append(layout, keys[layers], values[layers], cache, page_table, positions, exact_slots=exact_slots)
        if faults:
            self._apply_faults(page_table, positions, faults)

    def _apply_faults(self, page_table: Tensor, positions: Tensor, faults: Mapping[str, float]) -> None:
        """Multiply the numbers that were just stored by the must-fail control's factors."""
        # Rows that are not stored repeat the first row, so that two rows never write different numbers to the same slot.
        row = torch.where(positions >= 0, torch.arange(len(positions), device=self.device), 0)
        place = positions[row].clamp(min=0).long()
        pages = page_table[row, (place // PAGE_TOKENS).clamp(max=page_table.shape[1] - 1)].long()
        slots = place % PAGE_TOKENS
        for group in self.groups:
            for name, stack in group.tensors.items():
                fault = faults.get(f"{name}.{group.layers[0]}")
                if fault is not None:
                    factor = torch.where(positions[0] >= 0, torch.full((), fault, device=self.device), 1.0)
                    # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
                    stack[:, pages, :, slots] = saturated_product(stack[:, pages, :, slots], factor)

    def _enlarge(self, allocator: PageAllocator, needed: int) -> None:
        """Double the number of pages or exact buffers if memory allows it, else grow to `needed`; a failure changes nothing."""
        for capacity in sorted({max(needed, 2 * allocator.capacity), needed}, reverse=True):
            try:
                return self._resize(allocator, capacity)
            except torch.OutOfMemoryError:
                continue  # the exception frees the new tensors before the next attempt
        unit = f"pages of {PAGE_TOKENS} tokens" if allocator is self.pages else "exact buffers (one per sequence)"
        raise UserError(
            f"backend.device={self.device.type}: its memory is too small: {needed} {unit} are needed, "
            f"in addition to the present {allocator.capacity} while they are copied; run fewer or shorter sequences at once"
        )


def _with_kernel_type(array: Tensor) -> Tensor:
    """Return codes with the element type of CacheLayout: the pool stores float8 as bytes."""
    return array.view(torch.float8_e4m3fn) if array.dtype == torch.uint8 else array
