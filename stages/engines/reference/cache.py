"""A sequence's quantized cache: pages of codes and scales for all kept tokens, second copies in the window, and exact tokens.

Shapes: H KV heads, S new tokens, T tokens in the cache, D head_dim.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.core.records import StoredCopy
from stages.engines.reference.attention import Copies, Sources
from stages.engines.reference.formats import CPU, dequantize, quantize, static_scales
from stages.policies.arithmetic_torch import Static, Stored, concatenate_tokens, each
from stages.policies.formats import Format
from stages.policies.policy import PAGE_TOKENS, SIDES, KVPolicy, KVShape, Side, page_count
from stages.policies.scales import KVScales


@dataclass
class Storage:
    """Format and static scales of one stored copy of a layer's keys or values."""

    form: Format
    static: Static | None
    gain: float | Tensor = 1.0
    """The must-fail control's factor on all numbers that are read."""

    def write(self, x: Tensor) -> Stored:
        return quantize(x, self.form, self.static)

    def read(self, stored: Stored) -> Tensor:
        return dequantize(stored, self.form, self.static) * self.gain


LayerStorage = dict[Side, Storage]


def layer_storages(policy: KVPolicy, shape: KVShape, scales: KVScales, device: torch.device = CPU) -> list[LayerStorage]:
    """Return the storages of every layer. The caller must have checked `scales` against the policy."""

    def storage(layer: int, side: Side, form: Format) -> Storage:
        static = scales.layers[layer].get(side)
        return Storage(form, None if static is None else static_scales(static, form, shape.kv_heads, shape.head_dim, device))

    return [{side: storage(n, side, form) for side, form in policy.sides(n).items()} for n in range(shape.layers)]


class StoredTokens:
    """One copy of a sequence's tokens: the sinks' pages, then the pages after the `freed` tokens."""

    def __init__(self, storage: Storage, sink_pages: int = 0) -> None:
        self.storage, self.sinks = storage, sink_pages * PAGE_TOKENS
        self.length = 0
        self.freed = 0
        """Number of freed tokens."""
        self.held: Stored | None = None

    def append(self, x: Tensor) -> None:
        """Quantize and store x (H, S, D)."""
        new = self.storage.write(x)
        self.held = new if self.held is None else each(concatenate_tokens, [self.held, new])
        self.length += x.shape[1]

    def forget(self, first: int) -> None:
        """Free the pages before the sequence's page `first`, except the sinks' pages."""
        freed = max(0, first * PAGE_TOKENS - self.sinks)
        if freed > self.freed and self.held is not None:
            end = self.sinks + freed - self.freed
            self.held = each(lambda x: concatenate_tokens([x[0][:, : self.sinks], x[0][:, end:]]), [self.held])
        self.freed = freed

    def read(self) -> Copies | None:
        if self.held is None:
            return None
        sinks = self.sinks if self.freed else 0
        return Copies(self.storage.read(self.held), sinks + self.freed, sinks)

    def stored(self, *, in_window: bool) -> StoredCopy:
        """Return the codes and scales, with zeros in the gap of evicted tokens."""
        assert self.held is not None
        gap = 0 if in_window else self.freed

        def array(x: Tensor | None, dtype: Any) -> Any:
            if x is None:
                return None
            raw = x.contiguous().view(torch.uint8).cpu().numpy()
            none = np.zeros((len(raw), gap, raw.shape[2]), np.uint8)
            return np.concatenate([raw[:, : self.sinks], none, raw[:, self.sinks :]], axis=1).view(dtype)

        static, scaled = self.storage.static, self.storage.form.code.scale_storage
        return StoredCopy(
            first=self.freed - gap,
            codes=array(self.held.codes, np.uint8),
            scale=array(self.held.scale, scaled.numpy),
            zero=array(self.held.zero, np.float16),
            static_scale=None if static is None else static.scale.cpu().numpy(),
            static_zero=None if static is None or static.zero is None else static.zero.cpu().numpy(),
            evicted=((self.sinks, self.sinks + gap),) if gap else (),
        )

    @property
    def page_count(self) -> int:
        return page_count(self.length - self.freed)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, whole pages counted."""
        return 0 if self.held is None else page_bytes(self.held, self.page_count)


def page_bytes(stored: Stored, pages: int) -> int:
    return sum(pages * PAGE_TOKENS * tensor[:, :1].nbytes for tensor in stored.tensors)


class ExactTokens:
    """float16 copies of the first and the latest tokens of one side of one layer."""

    def __init__(self, policy: KVPolicy, shape: KVShape, device: torch.device) -> None:
        self.length = 0
        self.sinks, self.recent = (
            torch.zeros(shape.kv_heads, tokens, shape.head_dim, dtype=torch.float16, device=device)
            for tokens in (policy.sink_tokens, policy.recent_tokens)
        )
        """Ordered by position: the latest token comes last."""

    def append(self, x: Tensor) -> None:
        """Store x (H, S, D)."""
        fill = self.sinks[:, self.length : self.length + x.shape[1]]
        fill.copy_(x[:, : fill.shape[1]])
        joined = torch.cat([self.recent, x.half()], dim=1)
        self.recent = joined[:, joined.shape[1] - self.recent.shape[1] :].clone()
        self.length += x.shape[1]

    def read(self) -> tuple[Copies, Copies]:
        count = min(self.length, self.recent.shape[1])
        recent = self.recent[:, self.recent.shape[1] - count :]
        return Copies(self.sinks[:, : self.length].float()), Copies(recent.float(), self.length - count)

    @property
    def nbytes(self) -> int:
        return self.sinks.nbytes + self.recent.nbytes


class LayerCache:
    """Keys and values of one layer of one sequence."""

    def __init__(self, policy: KVPolicy, shape: KVShape, storages: LayerStorage, device: torch.device) -> None:
        self.policy, self.shape = policy, shape
        sinks = {side: 0 if side.in_window else policy.sink_pages for side in storages}
        self.pages = {side: StoredTokens(storage, sinks[side]) for side, storage in storages.items()}
        self.exact = {side: ExactTokens(policy, shape, device) for side in SIDES}

    @property
    def length(self) -> int:
        return self.exact[Side.KEY].length

    @property
    def kept_tokens(self) -> int:
        return self.length - self.pages[Side.KEY].freed

    @property
    def page_count(self) -> int:
        return self.pages[Side.KEY].page_count

    @property
    def pool_bytes(self) -> int:
        return sum(pages.nbytes for side, pages in self.pages.items() if not side.in_window)

    @property
    def window_bytes(self) -> int:
        return sum(pages.nbytes for side, pages in self.pages.items() if side.in_window)

    @property
    def exact_bytes(self) -> int:
        return sum(exact.nbytes for exact in self.exact.values())

    @property
    def stored(self) -> dict[Side, StoredCopy]:
        return {side: pages.stored(in_window=side.in_window) for side, pages in self.pages.items()}

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new keys and values (H, S, D), then free the pages that left the window or were evicted."""
        for side, pages in self.pages.items():
            pages.append(key if side.is_key else value)
            if side.in_window and self.policy.window is not None:
                pages.forget(self.policy.window.first_page(pages.length))
            elif evicted := self.policy.evicted_pages(pages.length, self.shape):
                pages.forget(evicted.stop)
        self.exact[Side.KEY].append(key)
        self.exact[Side.VALUE].append(value)

    def read(self, side: Side, new: Tensor) -> Sources:
        """Return the sources that new tokens attend to: the cache, and their own keys or values `new` (H, S, D)."""
        sinks, recent = self.exact[side].read()
        base, window = self.pages[side].read(), self.pages.get(side.window)
        return Sources(sinks, base, None if window is None else window.read(), recent, Copies(new, self.length))


def one_pass_sources(policy: KVPolicy, storages: LayerStorage, side: Side, x: Tensor) -> Sources:
    """Return the sources that a whole sequence x (H, T, D) attends to, as a cache would return them."""
    base, window = storages[side], storages.get(side.window)
    exact = Copies(x.half().float()) if policy.exact_tokens else None
    second = None if window is None else Copies(window.read(window.write(x)))
    return Sources(exact, Copies(base.read(base.write(x))), second, exact, Copies(x))
