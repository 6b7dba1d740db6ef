"""The quantized cache on a GPU: pools of all layers, tables with fixed addresses, one append for all layers of a layout.

Shapes: l layers of one format, L layers, N pages, M exact buffers, E exact tokens, H KV heads, D head_dim, W elements of a
token, B sequences, P pages of a row of the table, S new tokens of one sequence, T tokens in its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.core.errors import UserError
from pipeline.core.formats import MAX_FLOAT16
from pipeline.core.kv import PAGE_TOKENS, KVScales, Side
from pipeline.core.records import MemoryReport, StoredCopy
from plugins.kv_attention import ops, reference
from plugins.kv_attention.layout import CacheLayout
from stages.engines.paged.allocator import PageAllocator
from stages.engines.paged.sequences import PagedSequence, SequencePages

FIRST_COLUMNS = 16
"""Pages of a row of the table at first: 1,024 tokens."""


@dataclass
class LayerGroup:
    """Layers whose caches have one layout, and their tensors."""

    layout: CacheLayout
    layers: list[int]
    paged: dict[str, Tensor]
    """`key_pool`, ... (l, N, H, 64, W), as CacheLayout.pools says."""
    exact: dict[str, Tensor]
    """`key_exact`, `value_exact` (l, M, H, E, D)."""
    scales: dict[str, Tensor]
    """`key_scale`, `value_scale` (l, 1 | H) of static sides."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """Those of `scales` that are read with other numbers than tokens are stored with: the canary corrupted them."""
    faults: dict[str, Tensor] = field(default_factory=dict)
    """The canary's factors (l, 1, H, 1, 1) on stored scales, or on numbers that have none, by paged array."""

    def to_read(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the i-th layer that attention reads; their addresses stay the same until `moves` changes."""
        return {name: tensor[i] for name, tensor in (self.paged | self.exact | self.scales | self.read).items()}


class KernelCache(SequencePages):
    """The caches of all sequences.

    Kernels alone read and write what is on the device. The host knows which sequence has which pages, and how long it is.
    """

    def __init__(self, layouts: Sequence[CacheLayout], scales: KVScales, device: torch.device) -> None:
        """`layouts` are those of all layers, as check_kernels returns them; `scales` hold their static scales."""
        super().__init__()
        self.device = device
        self.moves = 0
        """Counts the times that tensors which a captured graph reads got another address."""
        self.page_table = torch.zeros(1, FIRST_COLUMNS, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.exact_slots = torch.zeros(1, dtype=torch.int32, device=device)
        self._table_rows: list[tuple[int, int]] = []
        """Handle and number of pages of each row of the page table."""
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
            self.groups.append(LayerGroup(layout, layers, {}, {}, static))
        by_layer = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        self.places = [by_layer[layer] for layer in range(len(layouts))]
        self._enlarge(self.pages, 0)
        self._enlarge(self.buffers, 0)

    def fill_tables(self, handles: Sequence[int], rows: int) -> None:
        """Write the tables of `handles` into the first rows, and empty sequences into the other rows up to `rows`."""
        sequences = [self.sequences[handle] for handle in handles]
        columns = max(len(sequence.pages) for sequence in sequences)
        old_rows, old_columns = self.page_table.shape
        if rows > old_rows or columns > old_columns:
            while old_columns < columns:
                old_columns *= 2
            size = (max(rows, old_rows), old_columns)
            page_table = torch.zeros(size, dtype=torch.int32, device=self.device)
            of_rows = [torch.zeros(size[0], dtype=torch.int32, device=self.device) for _ in range(2)]
            self.page_table, (self.lengths, self.exact_slots) = page_table, of_rows
            self._table_rows = []
            self.moves += 1
        batch = len(sequences)
        lengths = [sequence.length for sequence in sequences] + [0] * (rows - batch)
        self.lengths[:rows].copy_(torch.tensor(lengths, dtype=torch.int32))
        table_rows = [(handle, len(sequence.pages)) for handle, sequence in zip(handles, sequences, strict=True)]
        if table_rows != self._table_rows:
            # What lies behind a sequence's pages is never read.
            table = [sequence.pages + [0] * (columns - len(sequence.pages)) for sequence in sequences]
            self.page_table[:batch, :columns].copy_(torch.tensor(table, dtype=torch.int32))
            self.exact_slots[:batch].copy_(torch.tensor([sequence.buffer for sequence in sequences], dtype=torch.int32))
            self._table_rows = table_rows

    def append(self, handles: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store one token of every sequence of the tables, which `fill_tables` filled with `handles`.

        Args:
            handles: The B sequences.
            keys: New keys (L, B, H, D).
            values: New values (L, B, H, D).
        """
        rows = len(handles)
        sequences = [self.sequences[handle] for handle in handles]
        for group in self.groups:
            ops.append(
                *self._group_states(group, keys, values),
                self.page_table[:rows],
                self.lengths[:rows],
                exact_slots=self.exact_slots[:rows] if group.exact else None,
                sink_tokens=group.layout.sink_tokens,
                **group.paged,
                **group.exact,
                **group.scales,
            )
        pages = [sequence.pages[sequence.length // PAGE_TOKENS] for sequence in sequences]
        self._apply_fault(pages, [sequence.length % PAGE_TOKENS for sequence in sequences])
        for sequence in sequences:
            sequence.length += 1

    def extend(self, handle: int, keys: Tensor, values: Tensor) -> None:
        """Store S tokens of one sequence; keys and values (L, S, H, D).

        The tokens are S rows of one append, each with a table of its one page. Their exact copies are written separately:
        several tokens may share a slot, in which the last one must stay.
        """
        sequence = self.sequences[handle]
        tokens = keys.shape[1]
        positions = range(sequence.length, sequence.length + tokens)
        pages = [sequence.pages[position // PAGE_TOKENS] for position in positions]
        slots = [position % PAGE_TOKENS for position in positions]
        table, lengths = self._indices(pages, torch.int32)[:, None], self._indices(slots, torch.int32)
        for group in self.groups:
            new = self._group_states(group, keys, values)
            ops.append(*new, table, lengths, **group.paged, **group.scales)
            if group.exact:
                self._keep_exact(group, sequence, new)
        self._apply_fault(pages, slots)
        sequence.length += tokens

    def read(self, handle: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a token after the cached ones attends to, (H, T, D) float32."""
        sequence = self.sequences[handle]
        group, i = self.places[layer]
        tensors = group.to_read(i)
        key, value = reference.dequantize(group.layout, tensors, self._indices(sequence.pages), sequence.length)
        positions, slots = reference.exact_places(group.layout, sequence.length)
        if positions:
            columns, rows = self._indices(positions), self._indices(slots)
            for states, name in ((key, "key_exact"), (value, "value_exact")):
                states[:, columns] = tensors[name][sequence.buffer][:, rows].float()
        return key, value

    def stored(self, handle: int, layer: int) -> dict[Side, StoredCopy]:
        """Return what a sequence's pages hold of a layer, and the static scales that attention reads it with."""
        sequence = self.sequences[handle]
        group, i = self.places[layer]
        tensors, pages = group.to_read(i), self._indices(sequence.pages)

        def held(name: str) -> npt.NDArray[np.uint8] | None:
            if name not in group.paged:
                return None
            by_head = tensors[name][pages].transpose(0, 1).flatten(1, 2)[:, : sequence.length]
            rows: npt.NDArray[np.uint8] = by_head.contiguous().view(torch.uint8).cpu().numpy()
            return rows

        def copy(side: Side) -> StoredCopy:
            codes, bytes_, static = held(f"{side}_pool"), held(f"{side}_scale_pool"), tensors.get(f"{side}_scale")
            assert codes is not None
            scale: npt.NDArray[np.float16] | npt.NDArray[np.uint8] | None = bytes_
            if bytes_ is not None and not (group.layout.key if side.is_key else group.layout.value).in_blocks:
                scale = bytes_.view(np.float16)
            return StoredCopy(
                0,
                codes,
                scale,
                None,
                None if static is None else static.cpu().numpy().reshape(-1, 1, 1),
                None,
            )

        return {side: copy(side) for side in (Side.KEY, Side.VALUE)}

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
                _scale(paged, factors)
        self.moves += 1

    def _factors(self, chosen: Sequence[bool], heads: int, factor: float, head: int | None) -> Tensor:
        """`factor` of one head or all in the layers that are chosen, else 1: (l, heads)."""
        factors = torch.ones(len(chosen), heads, device=self.device)
        for i in (i for i, one in enumerate(chosen) if one):
            factors[i, slice(None) if head is None else head] = factor
        return factors

    def repeat_page(self) -> None:
        """Let the second page of every sequence hold what its first one does; sequences of one page stay as they are."""
        for sequence in self.sequences.values():
            for group in self.groups if len(sequence.pages) > 1 else ():
                for array in group.paged.values():
                    array[:, sequence.pages[1]] = array[:, sequence.pages[0]]

    def memory(self) -> MemoryReport:
        """Return the bytes of the tensors as allocated: pools and exact buffers grow by doubling."""

        def size(tensors: list[dict[str, Tensor]]) -> int:
            return sum(tensor.nbytes for by_name in tensors for tensor in by_name.values())

        return MemoryReport(
            pool_bytes=size([group.paged for group in self.groups]),
            exact_bytes=size([group.exact for group in self.groups]),
            window_bytes=0,
            static_scale_bytes=size([group.scales for group in self.groups]),
            pages=self.pages.capacity,
            live_tokens=self.live_tokens,
        )

    def _group_states(self, group: LayerGroup, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The group's layers of keys and values (L, ...)."""
        if len(self.groups) == 1:
            return keys.contiguous(), values.contiguous()
        layers = self._indices(group.layers)
        return keys[layers], values[layers]

    def _keep_exact(self, group: LayerGroup, sequence: PagedSequence, new: tuple[Tensor, Tensor]) -> None:
        """Write the exact copies of new tokens, keys and values (l, S, H, D), of which a sequence keeps some."""
        sink, recent = group.layout.sink_tokens, group.layout.recent_tokens
        tokens = new[0].shape[1]
        start, end = sequence.length, sequence.length + tokens
        sinks, newest = list(range(start, min(sink, end))), list(range(max(start, end - recent), end)) if recent else []
        slots = self._indices(sinks + [sink + position % recent for position in newest])
        chosen = self._indices([position - start for position in sinks + newest])
        for name, x in zip(("key_exact", "value_exact"), new, strict=True):
            group.exact[name][:, sequence.buffer][:, :, slots] = x[:, chosen].transpose(1, 2).half()

    def _apply_fault(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Multiply the scales, or the numbers, of tokens that were just stored by their group's faults."""
        for group in self.groups:
            for name, factors in group.faults.items():
                rows = self._indices(pages), self._indices(slots)
                array = group.paged[name]
                # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
                new = array[:, rows[0], :, rows[1]]
                _scale(new, factors[None, :, 0, :, 0])
                array[:, rows[0], :, rows[1]] = new

    def _indices(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

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


def _scale(tensor: Tensor, factor: Tensor) -> None:
    """Floating-point numbers times factors, in place, saturating at float16's range."""
    tensor.copy_((tensor.float() * factor).clamp(-MAX_FLOAT16, MAX_FLOAT16))
