"""Replays a sequence over the cache that another engine stored for it.

A correct engine differs from the reference engine only by rounding. But a number between two codes may round to either, and a
few such flips move the logits of a 4-bit cache more than a real fault does. Replaying over the engine's own codes removes the
flips. The logits then show whether the engine *reads* its cache correctly, and comparing each stored vector with the vector
computed here shows whether it *writes* correctly. A second, disturbed row of the same batch adds noise of one rounding to the
activations, and so measures how much rounding may cost.

Shapes: H KV heads, T tokens of the sequence, n tokens of a copy, D head_dim, W bytes and g scales of a token, V vocab_size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.core.records import StoredCopy
from stages.engines.base import Logits
from stages.engines.reference.attention import Block, BlockView, Copies, Sources
from stages.engines.reference.cache import LayerStorage, Storage, one_pass
from stages.engines.reference.formats import dequantize
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.policy import KVPolicy, Side

SMALLEST = 1e-30
"""Lower bound of a vector's length, which prevents a division by zero."""


@dataclass(frozen=True)
class Errors:
    """Distance of stored vectors from the computed vectors in excess of the nearest codes' distance, relative to their length.

    It is 0 for the nearest codes, and almost 0 for either code if a number lies halfway between two codes.
    """

    first: int
    """Position of the first token."""
    engine: Tensor
    """Errors (H, n) of the engine's stored vectors; infinite for a vector that is not finite."""
    disturbed: Tensor
    """Errors (H, n) of the vectors that the reference engine stores in the disturbed row."""

    def cpu(self) -> "Errors":
        """Return a copy in host memory."""
        return Errors(self.first, self.engine.cpu(), self.disturbed.cpu())


@dataclass(frozen=True)
class Replay:
    """Logits and stored vectors of one replayed sequence; rows as in `Fed.shown`."""

    logits: Logits
    """Logits (rows, V) over the engine's cache."""
    disturbed: Logits
    """Logits (rows, V) over the same cache, with disturbed activations."""
    errors: list[dict[Side, Errors]]
    """Errors by layer, for the copies that the engine showed."""

    def tail(self, rows: int) -> "Replay":
        """Return a replay with only the last `rows` rows of logits."""
        return replace(self, logits=self.logits[-rows:], disturbed=self.disturbed[-rows:])


@dataclass
class Tape:
    """State that the undisturbed and the disturbed row of a sequence share."""

    policy: KVPolicy
    storages: Sequence[LayerStorage]
    caches: Sequence[Mapping[Side, StoredCopy]]
    """The engine's stored copies by layer. If empty, the reference engine's own copies are read."""
    errors: list[dict[Side, Errors]] = field(default_factory=list)
    exact: dict[tuple[int, Side], Tensor] = field(default_factory=dict)
    """Vectors (H, T, D) that the undisturbed row computed in the current layer; `nearest` has their nearest codes."""
    nearest: dict[tuple[int, Side], Tensor] = field(default_factory=dict)


class ReplayView(BlockView):
    """A sequence in one row of a replay. The undisturbed row comes first in the batch."""

    first_row = 0

    def __init__(self, tape: Tape, blocks: Sequence[Block], *, disturbed: bool) -> None:
        self.tape, self.blocks, self.disturbed = tape, blocks, disturbed

    def exchange(self, layer: int, key: Tensor, value: Tensor) -> tuple[Sources, Sources]:
        if not self.disturbed:
            self.tape.errors.append({})
            self.tape.exact.clear()
            self.tape.nearest.clear()
        return self._sources(layer, Side.KEY, key), self._sources(layer, Side.VALUE, value)

    def _sources(self, layer: int, base: Side, x: Tensor) -> Sources:
        tape = self.tape
        storages = tape.storages[layer]
        exact, own, window, recent, new = one_pass(tape.policy, storages, base, x, None)
        shown = tape.caches[layer] if tape.caches else {}
        if base in shown and own is not None:
            own = self._replaced(layer, base, own, x, read_copy(shown[base], storages[base], x.device), shown[base].evicted)
        if base.window in shown and window is not None:
            copy = read_copy(shown[base.window], storages[base.window], x.device)
            window = self._replaced(layer, base.window, window, x, copy)
        return exact, own, window, recent, new

    def _replaced(
        self, layer: int, side: Side, own: Copies, x: Tensor, shown: Copies, evicted: tuple[int, int] = (0, 0)
    ) -> Copies:
        """Record the errors of the engine's copy; return the reference engine's own copy with the engine's tokens in it.

        Evicted tokens keep the reference engine's values.
        """
        tape, first = self.tape, shown.begin
        end = min(own.tokens.shape[1], first + shown.tokens.shape[1])
        part = slice(first, end)
        theirs, lost = shown.tokens[:, : end - first], slice(*evicted)
        theirs[:, lost] = own.tokens[:, part][:, lost]
        if not self.disturbed:
            tape.exact[layer, side], tape.nearest[layer, side] = x, own.tokens
            error = _excess(theirs, x[:, part], own.tokens[:, part])
            tape.errors[layer][side] = Errors(first, error, torch.zeros_like(error))
        else:
            error = _excess(own.tokens[:, part], tape.exact[layer, side][:, part], tape.nearest[layer, side][:, part])
            error[:, lost] = 0
            tape.errors[layer][side] = Errors(first, tape.errors[layer][side].engine, error)
        joined = own.tokens.clone()
        joined[:, part] = theirs
        return Copies(joined)


def _excess(stored: Tensor, exact: Tensor, nearest: Tensor) -> Tensor:
    """Return (H, n): how much farther `stored` is from `exact` than `nearest` is, relative to the length of `exact`."""
    far, near = ((x - exact).norm(dim=-1) for x in (stored, nearest))
    excess: Tensor = (far - near) / exact.norm(dim=-1).clamp(min=SMALLEST)
    return excess.nan_to_num(nan=torch.inf)


def read_copy(copy: StoredCopy, storage: Storage, device: torch.device) -> Copies:
    """Dequantize an engine's codes and scales: (H, n, D) float32 on a device."""
    code, scales = storage.form.code, _tensor(copy.scale, device)
    codes = _tensor(copy.codes, device).view(getattr(torch, code.storage.torch))
    if scales is not None:
        scales = scales.view(getattr(torch, code.scale_storage.torch))
    stored = Stored(codes, scales, _tensor(copy.zero, device))
    scale = _tensor(copy.static_scale, device)
    static = None if scale is None else Static(scale, _tensor(copy.static_zero, device))
    return Copies(dequantize(stored, storage.form, static), copy.first)


@overload
def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor: ...
@overload
def _tensor(array: npt.NDArray[Any] | None, device: torch.device) -> Tensor | None: ...
def _tensor(array: npt.NDArray[Any] | None, device: torch.device) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)


@contextmanager
def disturbed(model: Any, rounding: float) -> Iterator[None]:
    """Add normal noise to the output of every layer in the batch's second half, within this context."""
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
