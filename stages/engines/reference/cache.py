"""A sequence's cache: keys and values as the model computes them, quantized whenever they are read.

A token's codes depend on no other token, so they are the same at every read. Evicted tokens stay here and are masked
(attention.py); the bytes that an engine would need for a cache follow from the policy.

Shapes: H KV heads, S new tokens, T tokens of the sequence, D head_dim.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.core.records import StoredCopy
from stages.engines.reference.formats import CPU, dequantize, quantize, static_scales
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.formats import Format
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, Side
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

    def round(self, x: Tensor) -> Tensor:
        """Return numbers as they are read from a cache."""
        return self.read(self.write(x))


LayerStorage = dict[Side, Storage]


def layer_storages(policy: KVPolicy, shape: KVShape, scales: KVScales, device: torch.device = CPU) -> list[LayerStorage]:
    """Return the storages of every layer. The caller must have checked `scales` against the policy."""

    def storage(layer: int, side: Side, form: Format) -> Storage:
        static = scales.layers[layer].get(side)
        return Storage(form, None if static is None else static_scales(static, form, shape.kv_heads, shape.head_dim, device))

    return [{side: storage(n, side, form) for side, form in policy.sides(n).items()} for n in range(shape.layers)]


@dataclass(frozen=True)
class LayerCache:
    """Immutable keys and values (H, T, D) of one layer of one sequence; `append` returns a new cache."""

    key: Tensor
    value: Tensor

    @classmethod
    def empty(cls, shape: KVShape, device: torch.device) -> "LayerCache":
        none = torch.zeros(shape.kv_heads, 0, shape.head_dim, device=device)
        return cls(none, none)

    @property
    def length(self) -> int:
        return self.key.shape[1]

    def append(self, key: Tensor, value: Tensor) -> "LayerCache":
        return LayerCache(torch.cat([self.key, key], dim=1), torch.cat([self.value, value], dim=1))

    def stored(self, policy: KVPolicy, shape: KVShape, storages: LayerStorage) -> dict[Side, StoredCopy]:
        """Return the codes and scales that a cache of this policy holds."""
        lost = policy.evicted_pages(self.length, shape)
        evicted = ((lost.start * PAGE_TOKENS, lost.stop * PAGE_TOKENS),) if lost else ()
        copies = {}
        for side, storage in storages.items():
            first = policy.window.first_page(self.length) * PAGE_TOKENS if side.in_window and policy.window is not None else 0
            held = storage.write((self.key if side.is_key else self.value)[:, first:])
            static = storage.static
            copies[side] = StoredCopy(
                first=first,
                codes=_array(held.codes, np.uint8),
                scale=_array(held.scale, storage.form.code.scale_storage.numpy),
                zero=_array(held.zero, np.float16),
                static_scale=None if static is None else static.scale.cpu().numpy(),
                static_zero=None if static is None or static.zero is None else static.zero.cpu().numpy(),
                evicted=() if side.in_window else evicted,
            )
        return copies


def _array(x: Tensor | None, dtype: Any) -> Any:
    return None if x is None else x.contiguous().view(torch.uint8).cpu().numpy().view(dtype)
