"""Layers of the cache on a GPU that one launch stores into.

Shapes: l layers of one format, L layers, N pages, M exact buffers, E exact tokens, H KV heads, D head_dim, W elements of a
token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.formats.spec import MAX_FLOAT16
from plugins.kv_attention.layout import CacheLayout


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

    def of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the group's layers of new keys and values (L, ...)."""
        part = slice(self.first, self.first + len(self.layers))
        return keys[part], values[part]

    def to_read(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the i-th layer that attention reads; their addresses stay the same until `moves` changes."""
        return {name: tensor[i] for name, tensor in (self.paged | self.exact | self.scales | self.read).items()}

    def apply_faults(self, pages: Tensor, slots: Tensor, stored: Tensor) -> None:
        """Multiply the scales, or the numbers, at some places by the group's faults; leave them where `stored` is false."""
        for name, factors in self.faults.items():
            factor = factors[None, :, 0, :, 0]
            array = self.paged[name]
            # (tokens, l, H, W): indices on both sides of a slice put their dimension first.
            new = array[:, pages, :, slots]
            multiply(new, torch.where(stored, factor, 1.0))
            array[:, pages, :, slots] = new


def multiply(tensor: Tensor, factor: Tensor) -> None:
    """Multiply floating-point numbers by factors, in place, saturating at float16's range."""
    tensor.copy_((tensor.float() * factor).clamp(-MAX_FLOAT16, MAX_FLOAT16))
