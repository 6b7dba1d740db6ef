"""Near relatives of a policy: variants that an engine computes if it misreads the policy in one respect.

Examples are codes that are rounded towards zero, static scales that are ignored, or the other 8-bit float. Each relative is a
reference engine over the same model, with a cache that is written or read in that wrong way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.engines.reference.cache import LayerStorage, Storage
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import quantize
from stages.policies.arithmetic_torch import Static, Stored, pack
from stages.policies.policy import FP16_POLICY, PAGE_TOKENS, Side

SIDES = (Side.KEY, Side.VALUE)


@dataclass(frozen=True)
class TowardsZero(Storage):
    """Storage that rounds codes towards zero."""

    def write(self, x: Tensor) -> Stored:
        return quantize(x, self.form, self.static, towards_zero=True)


@dataclass(frozen=True)
class Coarser(Storage):
    """Storage that loses the last bit of every code."""

    def write(self, x: Tensor) -> Stored:
        stored = super().write(x)
        if self.form.exact:
            return stored
        bits = self.form.code.bits
        none = torch.zeros(8 * stored.codes.shape[-1] // bits, device=stored.codes.device)
        last = pack(none + 1, bits) ^ pack(none, bits)
        codes = (stored.codes.view(torch.int8) & ~last).view(stored.codes.dtype)
        return replace(stored, codes=codes)


@dataclass(frozen=True)
class Shifted(Storage):
    """Storage that reads each token from the position `tokens` earlier in the same sequence."""

    tokens: int

    def read(self, stored: Stored, gain: Tensor | None = None) -> Tensor:
        return super().read(stored, gain).roll(self.tokens, dims=-2)


def relatives(reference: TorchEngine) -> Iterator[tuple[str, TorchEngine]]:
    """Yield (description of the mistake, engine) for each relative of the reference engine's policy.

    The relatives run prompts in the same chunks as the reference engine.
    """
    for what, relative in _relatives(reference):
        relative.prefill_chunk, relative.reads_itself = reference.prefill_chunk, reference.reads_itself
        yield what, relative


def _relatives(reference: TorchEngine) -> Iterator[tuple[str, TorchEngine]]:
    storages = reference.storages

    def like(changed: list[LayerStorage]) -> TorchEngine:
        return TorchEngine(reference.model, reference.policy, reference.shape, changed, reference.prefill_chunk)

    def each(change: Callable[[Storage], Storage]) -> TorchEngine:
        return like([{side: change(storage) for side, storage in layer.items()} for layer in storages])

    if reference.policy != FP16_POLICY:
        yield "keys and values are not quantized", TorchEngine.from_model(reference.model, FP16_POLICY)
        yield "codes are rounded towards zero", each(lambda s: TowardsZero(s.form, s.static))
        yield "the last bit of every code is lost", each(lambda s: Coarser(s.form, s.static))
    if reference.policy.eviction is not None:
        keeping = reference.policy.model_copy(update={"eviction": None})
        yield "nothing is evicted", TorchEngine(reference.model, keeping, reference.shape, storages, reference.prefill_chunk)
    forms = {storage.form for layer in storages for storage in layer.values()}
    if any(form.code.neighbour for form in forms):
        others = {form: form.model_copy(update={"dtype": form.code.neighbour or form.dtype}) for form in forms}
        names = " and ".join(sorted({form.dtype.removeprefix("fp8_").upper() for form in others.values() if form not in forms}))
        yield f"codes are {names}", each(lambda s: Storage(others[s.form], s.static))
        yield (
            f"codes are {names}, rounded towards zero",
            each(lambda s: TowardsZero(others[s.form], s.static)),
        )
    yield from ((what, like(changed)) for what, changed in _other_scales(storages))
    yield "each token reads the copy of the token before", each(lambda s: Shifted(s.form, s.static, 1))
    yield "each page reads the page before", each(lambda s: Shifted(s.form, s.static, PAGE_TOKENS))


def _other_scales(storages: list[LayerStorage]) -> Iterator[tuple[str, list[LayerStorage]]]:
    """Yield (description, storages) for each wrong set of static scales."""
    if not any(storage.static for layer in storages for storage in layer.values()):
        return
    yield "every static scale is 1.0", [{side: _scaled_one(storage) for side, storage in layer.items()} for layer in storages]
    if len(storages) > 1:
        others = [*storages[1:], storages[0]]
        yield (
            "each layer has the static scales of the next",
            [_scaled_like(*pair) for pair in zip(storages, others, strict=True)],
        )
    pairs = [pair for layer in storages if (pair := _pair(layer)) is not None]
    if len(pairs) == len(storages):
        swapped = [_with(layer, value, key) for layer, (key, value) in zip(storages, pairs, strict=True)]
        yield "keys have the values' scale, and values the keys'", swapped
        larger = [Static(torch.maximum(key.scale, value.scale), None) for key, value in pairs]
        shared = [_with(layer, one, one) for layer, one in zip(storages, larger, strict=True)]
        yield "keys and values share the larger of their scales", shared


def _scaled_one(storage: Storage) -> Storage:
    static = storage.static
    return storage if static is None else Storage(storage.form, Static(torch.ones_like(static.scale), static.zero))


def _scaled_like(layer: LayerStorage, other: LayerStorage) -> LayerStorage:
    """Return a layer's storage with another layer's static scales, on the sides that have equal shapes in both layers."""

    def scaled(side: Side, storage: Storage) -> Storage:
        static = other[side].static if side in other else None
        fits = storage.static is not None and static is not None and storage.static.scale.shape == static.scale.shape
        return Storage(storage.form, static) if fits else storage

    return {side: scaled(side, storage) for side, storage in layer.items()}


def _pair(layer: LayerStorage) -> tuple[Static, Static] | None:
    """Return the static scales of keys and values; None if a side lacks scales, has zero points or the shapes differ."""
    key, value = (layer[side].static for side in SIDES)
    if key is None or value is None or key.zero is not None or value.zero is not None:
        return None
    return (key, value) if key.scale.shape == value.scale.shape else None


def _with(layer: LayerStorage, key: Static, value: Static) -> LayerStorage:
    return {**layer, **{side: Storage(layer[side].form, static) for side, static in zip(SIDES, (key, value), strict=True)}}
