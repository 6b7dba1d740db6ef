"""Replays a sequence over the cache that another engine stored for it.

A correct engine differs from the reference engine only by rounding. But a number between two codes may round either way, and a
few such flips move the logits of a 4-bit cache more than a real fault does. Replaying over the engine's own codes removes the
flips. The logits then show whether the engine *reads* its cache correctly, and comparing each stored vector with the vector
computed here shows whether it *writes* correctly. A second, disturbed row of the same batch adds noise of one rounding to the
activations, and so measures how much rounding may cost.

Shapes: H KV heads, T tokens of the sequence, n tokens of a copy, D head_dim, W bytes and g scales of a token, V vocab_size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.core.records import StoredCopy
from stages.engines.interface import Logits
from stages.engines.reference.attention import Block, Sources, attend
from stages.engines.reference.cache import LayerCache, LayerStorage, Storage
from stages.engines.reference.formats import dequantize
from stages.engines.reference.model import LayerAttention
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.policy import KVPolicy, Side

SMALLEST = 1e-30
"""Lower bound of a vector's length, which prevents a division by zero."""


@dataclass(frozen=True)
class Errors:
    """Errors of stored vectors, relative to the length of the computed vector.

    An error is the stored vector's distance from the computed vector, minus the distance of the nearest codes. The error of the
    nearest codes is 0. If a number lies halfway between two codes, the error of both is almost 0.
    """

    first: int
    """Position of the first token."""
    engine: Tensor
    """Errors (H, n) of the engine's stored vectors; infinite for a vector that is not finite."""
    disturbed: Tensor
    """Errors (H, n) of the vectors that the reference engine stores in the disturbed row."""

    def cpu(self) -> "Errors":
        return Errors(self.first, self.engine.cpu(), self.disturbed.cpu())


@dataclass(frozen=True)
class Replay:
    """Logits and stored vectors of one replayed sequence; rows as in `Fed.rows`."""

    logits: Logits
    """Logits (rows, V) over the engine's cache."""
    disturbed: Logits
    """Logits (rows, V) over the same cache, with disturbed activations; `logits` itself if they were not computed."""
    errors: list[dict[Side, Errors]]
    """Errors by layer, for the copies that the engine returned."""

    def tail(self, rows: int) -> "Replay":
        logits = self.logits[-rows:]
        return replace(self, logits=logits, disturbed=self.disturbed[-rows:] if self.measured else logits)

    @property
    def measured(self) -> bool:
        """Whether the disturbed rows were computed."""
        return self.disturbed is not self.logits


class OnePassView:
    """A whole sequence in one row of a batch, over its own codes or over the codes that another engine stored.

    The undisturbed row of a replayed sequence comes first in the batch. A sequence that begins like an earlier sequence of the
    row computes only the tokens after the common ones.
    """

    def __init__(
        self,
        policy: KVPolicy,
        storages: Sequence[LayerStorage],
        blocks: Sequence[Block],
        shown: Sequence[Mapping[Side, StoredCopy]] = (),
        undisturbed: "OnePassView | None" = None,
        origin: "tuple[OnePassView, int] | None" = None,
    ) -> None:
        """Prepare a row.

        Args:
            shown: The other engine's stored copies by layer; empty if the row reads its own codes.
            undisturbed: The sequence's undisturbed row; None if this row is the undisturbed one.
            origin: Row of a sequence with the same first tokens and stored copies, and the number of these tokens.
        """
        self.origin = None if origin is None else origin[0]
        self.first_row = 0 if origin is None else origin[1]
        """Position of the first new token."""
        self.policy, self.storages, self.blocks, self.shown = policy, storages, blocks, shown
        self.undisturbed = undisturbed
        self.errors: list[dict[Side, Errors]] = []
        """Errors by layer. The undisturbed row also receives the errors of the disturbed row."""
        self.layer: LayerCache
        """Keys and values of the current layer."""
        self.computed: dict[Side, tuple[Tensor, Tensor]] = {}
        """Computed vectors (H, T, D) of the current layer, and their nearest codes as numbers."""

    def attend(self, layer: int, q: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        self.errors.append({})
        self.computed.clear()
        self.layer = self._join(layer, key, value)
        keys, values = self._sources(layer, Side.KEY, self.layer.key), self._sources(layer, Side.VALUE, self.layer.value)
        out = torch.empty_like(q)
        for block in self.blocks:
            rows = slice(block.begin - self.first_row, block.end - self.first_row)
            key_pieces, value_pieces = (block.pieces[options.window, sources.window is not None] for sources in (keys, values))
            out[:, :, rows] = attend(q[:, :, rows], keys, values, key_pieces, value_pieces, options)
        return out

    def _join(self, layer: int, key: Tensor, value: Tensor) -> LayerCache:  # noqa: ARG002
        """Return the sequence's keys and values in a layer, with the new ones at the end."""
        if self.origin is None:
            return LayerCache(key, value)
        earlier = self.origin.layer
        return LayerCache(earlier.key[:, : self.first_row], earlier.value[:, : self.first_row]).append(key, value)

    def _sources(self, layer: int, base: Side, x: Tensor) -> Sources:
        """Return a sequence's keys or values x (H, T, D) in every form that rows read."""
        storages, copies = self.storages[layer], self.shown[layer] if self.shown else {}

        def read(side: Side) -> Tensor:
            own = storages[side].round(x)
            return self._replace_codes(layer, side, own, x, copies[side]) if side in copies else own

        exact = x.half().float() if self.policy.exact_tokens else None
        return Sources(exact, read(base), read(base.window) if base.window in storages else None, x)

    def _replace_codes(self, layer: int, side: Side, own: Tensor, x: Tensor, copy: StoredCopy) -> Tensor:
        """Record this row's errors; return `own`, its numbers (H, T, D), with all kept tokens taken from the other engine.

        The undisturbed row records errors of the engine's copy, the disturbed row errors of the reference engine's copy.
        """
        stored = read_copy(copy, self.storages[layer][side], x.device)
        part = slice(copy.first, min(own.shape[1], copy.first + stored.shape[1]))
        lost = torch.zeros(part.stop - part.start, dtype=torch.bool, device=x.device)
        for start, stop in copy.evicted:
            lost[start:stop] = True
        stored = stored[:, : part.stop - part.start]
        stored[:, lost] = own[:, part][:, lost]
        if self.undisturbed is None:
            self.computed[side] = x, own
            error = _excess_error(stored, x[:, part], own[:, part])
            self.errors[layer][side] = Errors(copy.first, error, torch.zeros_like(error))
        else:
            exact, nearest = self.undisturbed.computed[side]
            error = _excess_error(own[:, part], exact[:, part], nearest[:, part])
            error[:, lost] = 0
            errors = self.undisturbed.errors[layer]
            errors[side] = replace(errors[side], disturbed=error)
        joined = own.clone()
        joined[:, part] = stored
        return joined


class CachedView(OnePassView):
    """New tokens of a sequence whose earlier tokens are in the cache."""

    def __init__(
        self, policy: KVPolicy, storages: Sequence[LayerStorage], blocks: Sequence[Block], caches: list[LayerCache]
    ) -> None:
        super().__init__(policy, storages, blocks)
        self.caches, self.first_row = caches, caches[0].length
        self.after: list[LayerCache] = []

    def _join(self, layer: int, key: Tensor, value: Tensor) -> LayerCache:
        self.after.append(self.caches[layer].append(key, value))
        return self.after[layer]

    def store(self) -> None:
        """Keep the new keys and values. Called after all layers have run, so that a refused token changes nothing."""
        self.caches[:] = self.after


def _excess_error(stored: Tensor, exact: Tensor, nearest: Tensor) -> Tensor:
    """Return how much farther `stored` is from `exact` than `nearest` is, relative to the length of `exact`: (H, n)."""
    far, near = ((x - exact).norm(dim=-1) for x in (stored, nearest))
    excess: Tensor = (far - near) / exact.norm(dim=-1).clamp(min=SMALLEST)
    return excess.nan_to_num(nan=torch.inf)


def read_copy(copy: StoredCopy, storage: Storage, device: torch.device) -> Tensor:
    """Dequantize an engine's codes and scales: (H, n, D) float32 on a device."""

    def tensor(array: npt.NDArray[Any] | None, dtype: str | None = None) -> Any:
        if array is None:
            return None
        moved = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return moved if dtype is None else moved.view(getattr(torch, dtype))

    code = storage.form.code
    scale, zero = tensor(copy.scale, code.scale_storage.torch), tensor(copy.zero)
    static = None if copy.static_scale is None else Static(tensor(copy.static_scale), tensor(copy.static_zero))
    return dequantize(Stored(tensor(copy.codes, code.storage.torch), scale, zero), storage.form, static)


@contextmanager
def disturb_layers(model: Any, rounding: float) -> Iterator[None]:
    """Within this context, add normal noise to every layer's output in the second half of the batch."""
    generator = torch.Generator(model.device).manual_seed(0)

    def disturb(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001  (torch's signature)
        hidden = output[0] if isinstance(output, tuple) else output
        rows = hidden[len(hidden) // 2 :]
        noise = torch.randn(rows.shape, generator=generator, device=generator.device)
        rows += rounding * rows.pow(2).mean(-1, keepdim=True).sqrt() * noise

    hooks = [layer.register_forward_hook(disturb) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
