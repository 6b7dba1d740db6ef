"""The quantized cache on a GPU: pools of all layers, tables with fixed addresses, one append for all layers of a format.

Shapes: l layers of one format, L layers, N pages, M exact buffers, E exact tokens, H KV heads, D head_dim, W elements of a
token, B sequences, P pages of a row of the table, S new tokens of one sequence, T tokens in its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from pipeline.core.errors import UserError
from pipeline.core.formats import MAX_FLOAT16
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVScales, KVShape
from pipeline.core.records import MemoryReport
from plugins.kv_attention import ops, reference
from plugins.kv_attention.layout import CacheLayout
from stages.engines.paged.allocator import Numbers
from stages.engines.paged.kernel_layout import layer_layouts

FIRST_COLUMNS = 16
"""Pages of a row of the table at first: 1,024 tokens."""


@dataclass
class _Sequence:
    buffer: int
    """Its exact buffer."""
    length: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass
class LayerGroup:
    """Layers that are stored alike."""

    layout: CacheLayout
    layers: list[int]
    paged: dict[str, Tensor]
    """`key_pool`, ... (l, N, H, 64, W), as CacheLayout.pools says."""
    exact: dict[str, Tensor]
    """`key_exact`, `value_exact` (l, M, H, E, D)."""
    scales: dict[str, Tensor]
    """`key_scale`, `value_scale` (l, 1 | H) of static sides."""
    read_key_scale: Tensor | None
    """What keys are read with: `key_scale` itself, unless the canary made it wrong."""
    fault: float = 1.0
    """What the canary multiplies stored scales, or keys that have none, with; stays 1 for static keys."""

    @property
    def faulty(self) -> str:
        """The paged array whose entries carry `fault`."""
        return "key_scale_pool" if self.layout.key.dynamic else "key_pool"

    def to_read(self, i: int) -> dict[str, Tensor]:
        """The i-th of the layers as attention reads it; every tensor is where it was the last time, until `moves` changes."""
        tensors = {name: tensor[i] for name, tensor in (self.paged | self.exact | self.scales).items()}
        if self.read_key_scale is not None:
            tensors["key_scale"] = self.read_key_scale[i]
        return tensors


class KernelCache:
    """The caches of all sequences. What is on the device is read and written by the kernels alone; which sequence has
    which pages, and how long it is, the host knows."""

    def __init__(self, policy: KVPolicy, shape: KVShape, scales: KVScales, device: torch.device) -> None:
        self.device = device
        self.moves = 0
        """How often tensors that a captured graph reads got another address."""
        self._pages, self._buffers = Numbers(), Numbers()
        self._sequences: dict[int, _Sequence] = {}
        self._handles = count()
        self.page_table = torch.zeros(1, FIRST_COLUMNS, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.exact_slots = torch.zeros(1, dtype=torch.int32, device=device)
        self._shown: list[tuple[int, int]] = []
        """Handle and number of pages of each row of the table."""
        self.groups: list[LayerGroup] = []
        self.places: list[tuple[LayerGroup, int]] = []
        """Where each layer is."""
        by_layout: dict[CacheLayout, list[int]] = {}
        for layer, layout in enumerate(layer_layouts(policy, shape)):
            by_layout.setdefault(layout, []).append(layer)
        for layout, layers in by_layout.items():
            static = {
                f"{side}_scale": torch.tensor([scales.layers[n][side].scale for n in layers], device=device)  # type: ignore[index]
                for side, form in (("key", layout.key), ("value", layout.value))
                if form.static
            }
            self.groups.append(LayerGroup(layout, layers, {}, {}, static, static.get("key_scale")))
        by_layer = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        self.places = [by_layer[layer] for layer in range(shape.layers)]
        self._grow("paged", self._pages, 0)
        self._grow("exact", self._buffers, 0)

    def start(self) -> int:
        """A new, empty sequence's handle; UserError where memory has no buffer for it."""
        if not self._buffers.free:
            self._grow("exact", self._buffers, self._buffers.used + 1)
        handle = next(self._handles)
        self._sequences[handle] = _Sequence(self._buffers.take())
        return handle

    def release(self, handle: int) -> None:
        sequence = self._sequences.pop(handle)
        self._buffers.give(sequence.buffer)
        for page in sequence.pages:
            self._pages.give(page)

    def length(self, handle: int) -> int:
        if handle not in self._sequences:
            raise KeyError(f"sequence {handle} was released or never started")
        return self._sequences[handle].length

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        """Give each sequence the pages for `tokens` more tokens, or raise UserError and give none a page."""
        wanted = {h: -(-(self.length(h) + tokens) // PAGE_TOKENS) - len(self._sequences[h].pages) for h in handles}
        needed = self._pages.used + sum(wanted.values())
        if needed > self._pages.capacity:
            self._grow("paged", self._pages, needed)
        for handle, pages in wanted.items():
            self._sequences[handle].pages.extend(self._pages.take() for _ in range(pages))

    def show(self, handles: Sequence[int], rows: int) -> None:
        """Let the first rows of the tables be those of `handles`, and up to `rows` be empty sequences."""
        held = [self._sequences[handle] for handle in handles]
        columns = max(len(sequence.pages) for sequence in held)
        old_rows, old_columns = self.page_table.shape
        if rows > old_rows or columns > old_columns:
            while old_columns < columns:
                old_columns *= 2
            size = (max(rows, old_rows), old_columns)
            page_table = torch.zeros(size, dtype=torch.int32, device=self.device)
            of_rows = [torch.zeros(size[0], dtype=torch.int32, device=self.device) for _ in range(2)]
            self.page_table, (self.lengths, self.exact_slots) = page_table, of_rows
            self._shown = []
            self.moves += 1
        lengths = [sequence.length for sequence in held] + [0] * (rows - len(held))
        self.lengths[:rows].copy_(torch.tensor(lengths, dtype=torch.int32))
        shown = [(handle, len(sequence.pages)) for handle, sequence in zip(handles, held, strict=True)]
        if shown != self._shown:
            # What lies behind a sequence's pages is never read.
            table = [sequence.pages + [0] * (columns - len(sequence.pages)) for sequence in held]
            self.page_table[: len(held), :columns].copy_(torch.tensor(table, dtype=torch.int32))
            self.exact_slots[: len(held)].copy_(torch.tensor([sequence.buffer for sequence in held], dtype=torch.int32))
            self._shown = shown

    def append(self, handles: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store one token of every sequence that `show` showed last, in this order; keys and values (L, B, H, D)."""
        rows = len(handles)
        sequences = [self._sequences[handle] for handle in handles]
        for group in self.groups:
            ops.append(
                *self._of(group, keys, values),
                self.page_table[:rows],
                self.lengths[:rows],
                exact_slots=self.exact_slots[:rows] if group.exact else None,
                sink_tokens=group.layout.sink_tokens,
                **group.paged,
                **group.exact,
                **group.scales,
            )
        pages = [sequence.pages[sequence.length // PAGE_TOKENS] for sequence in sequences]
        self._spoil(pages, [sequence.length % PAGE_TOKENS for sequence in sequences])
        for sequence in sequences:
            sequence.length += 1

    def extend(self, handle: int, keys: Tensor, values: Tensor) -> None:
        """Store S tokens of one sequence; keys and values (L, S, H, D).

        They are S rows of one append, each with a table of its one page. Their exact copies are written apart, since
        several of them would meet in one slot, of which the last must stay.
        """
        sequence = self._sequences[handle]
        tokens = keys.shape[1]
        positions = range(sequence.length, sequence.length + tokens)
        pages = [sequence.pages[position // PAGE_TOKENS] for position in positions]
        slots = [position % PAGE_TOKENS for position in positions]
        table, lengths = self._indices(pages, torch.int32)[:, None], self._indices(slots, torch.int32)
        for group in self.groups:
            new = self._of(group, keys, values)
            ops.append(*new, table, lengths, **group.paged, **group.scales)
            if group.exact:
                self._keep_exact(group, sequence, new)
        self._spoil(pages, slots)
        sequence.length += tokens

    def read(self, handle: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a token after the cached ones sees, (H, T, D) float32."""
        sequence = self._sequences[handle]
        group, i = self.places[layer]
        tensors = group.to_read(i)
        key, value = reference.dequantize(group.layout, tensors, self._indices(sequence.pages), sequence.length)
        positions, slots = reference.exact_places(group.layout, sequence.length)
        if positions:
            places, found = self._indices(positions), self._indices(slots)
            for seen, name in ((key, "key_exact"), (value, "value_exact")):
                seen[:, places] = tensors[name][sequence.buffer][:, found].float()
        return key, value

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply what the pools' keys are read with, of stored and of later tokens; the codes stay right."""
        for group in self.groups:
            if group.read_key_scale is not None:
                group.read_key_scale = group.read_key_scale * factor
            else:
                group.fault *= factor
                _scale(group.paged[group.faulty], factor)
        self.moves += 1

    def memory(self) -> MemoryReport:
        """Bytes of the tensors as allocated: pools and exact buffers grow by doubling."""

        def size(tensors: list[dict[str, Tensor]]) -> int:
            return sum(tensor.nbytes for named in tensors for tensor in named.values())

        return MemoryReport(
            pool_bytes=size([group.paged for group in self.groups]),
            exact_bytes=size([group.exact for group in self.groups]),
            window_bytes=0,
            static_scale_bytes=size([group.scales for group in self.groups]),
            pages=self._pages.capacity,
            live_tokens=sum(sequence.length for sequence in self._sequences.values()),
        )

    def _of(self, group: LayerGroup, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The group's layers of keys and values (L, ...)."""
        if len(self.groups) == 1:
            return keys.contiguous(), values.contiguous()
        layers = self._indices(group.layers)
        return keys[layers], values[layers]

    def _keep_exact(self, group: LayerGroup, sequence: _Sequence, new: tuple[Tensor, Tensor]) -> None:
        sink, recent = group.layout.sink_tokens, group.layout.recent_tokens
        tokens = new[0].shape[1]
        start, end = sequence.length, sequence.length + tokens
        sinks, newest = list(range(start, min(sink, end))), list(range(max(start, end - recent), end)) if recent else []
        slots = self._indices(sinks + [sink + position % recent for position in newest])
        chosen = self._indices([position - start for position in sinks + newest])
        for name, x in zip(("key_exact", "value_exact"), new, strict=True):
            group.exact[name][:, sequence.buffer][:, :, slots] = x[:, chosen].transpose(1, 2).half()

    def _spoil(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Give tokens that were just stored the canary's fault."""
        for group in self.groups:
            if group.fault != 1:
                rows = self._indices(pages), self._indices(slots)
                array = group.paged[group.faulty]
                # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
                new = array[:, rows[0], :, rows[1]]
                _scale(new, group.fault)
                array[:, rows[0], :, rows[1]] = new

    def _indices(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def _grow(self, kind: Literal["paged", "exact"], numbers: Numbers, needed: int) -> None:
        """Room for at least `needed` pages or exact buffers: for twice as many as there are, where memory allows that.

        All tensors are made before one takes the place of an old one: a cache that could not grow is as it was.
        """
        for capacity in sorted({max(needed, 2 * numbers.capacity), needed}, reverse=True):
            try:
                larger = [self._larger(group, kind, capacity) for group in self.groups]
            except torch.OutOfMemoryError:
                continue  # what was made so far goes with the exception, before the next attempt
            for group, tensors in zip(self.groups, larger, strict=True):
                setattr(group, kind, tensors)
            numbers.grow(capacity)
            self.moves += 1
            return
        what = f"pages of {PAGE_TOKENS} tokens" if kind == "paged" else "exact buffers, one a sequence,"
        raise UserError(
            f"backend.device={self.device.type}: its memory is too small: {needed} {what} are needed, "
            f"beside the {numbers.capacity} that are moved; run fewer or shorter sequences at once"
        )

    def _larger(self, group: LayerGroup, kind: Literal["paged", "exact"], capacity: int) -> dict[str, Tensor]:
        """A group's tensors (l, *shape) for `capacity` pages or buffers, which begin with what is stored."""
        old = group.paged if kind == "paged" else group.exact
        specs = group.layout.pools(capacity) if kind == "paged" else group.layout.exact_buffers(capacity)
        new = {}
        for name, (dtype, shape) in specs.items():
            new[name] = torch.zeros(len(group.layers), *shape, dtype=getattr(torch, dtype), device=self.device)
            if name in old:
                new[name][:, : old[name].shape[1]] = old[name]
        return new


def _scale(tensor: Tensor, factor: float) -> None:
    """Floating-point numbers times a factor, in place, saturating at float16's range."""
    tensor.copy_((tensor.float() * factor).clamp(-MAX_FLOAT16, MAX_FLOAT16))
