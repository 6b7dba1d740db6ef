"""Explains the deviation of an engine by a known mistake.

A faulty reference is a reference engine with one such mistake in writing or reading its cache. If a deviating engine is much
closer to a faulty reference than to the reference engine, it probably makes the same mistake.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from stages.core.records import or_infinite
from stages.engines.reference.cache import Storage
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import quantize
from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.policy import FP16_POLICY
from stages.verdict.conformance import ComparedRequest, Explanation

CLOSER = 4.0
"""A faulty reference explains an engine if the engine is at least this many times closer to it than to the reference engine."""


class TowardsZero(Storage):
    """Storage that rounds codes towards zero."""

    def write(self, x: Tensor) -> Stored:
        return quantize(x, self.form, self.static, towards_zero=True)


def faulty_references(reference: TorchEngine) -> Iterator[tuple[str, TorchEngine]]:
    """Yield (description of a known mistake, reference engine with this mistake) for the mistakes that fit the policy."""

    def faulty(change: Callable[[Storage], Storage], **policy: object) -> TorchEngine:
        storages = [{side: change(storage) for side, storage in layer.items()} for layer in reference.storages]
        changed = reference.policy.model_copy(update=policy)
        return TorchEngine(reference.model, changed, reference.shape, storages, reference.prefill_chunk)

    if reference.policy != FP16_POLICY:
        yield "keys and values are not quantized", TorchEngine.from_model(reference.model, FP16_POLICY)
        yield "codes are rounded towards zero", faulty(lambda storage: TowardsZero(storage.form, storage.static))
    if any(storage.static for layer in reference.storages for storage in layer.values()):
        yield "every static scale is 1.0", faulty(_scaled_one)
    if reference.policy.eviction is not None:
        yield "nothing is evicted", faulty(lambda storage: storage, eviction=None)


def _scaled_one(storage: Storage) -> Storage:
    static = storage.static
    return storage if static is None else Storage(storage.form, Static(torch.ones_like(static.scale), static.zero))


def find_explanation(comparer: SequenceComparer, sequence: ForcedSequence) -> Explanation | None:
    """Return the known mistake that explains a deviating engine; None if none does.

    A mistake explains the engine if the engine conforms to the faulty reference with this mistake, or is CLOSER times nearer to
    the faulty reference than to the reference engine. If the engine's codes have the policy's formats, faulty references with
    other formats are excluded.
    """
    reference = comparer.reference.engine
    quantized = any(sequence.layers) and not comparer.problem(sequence)
    own = _compared(comparer, sequence, reference)
    limit = max(1.0, own.times_allowed(comparer.reference.limit) / CLOSER)
    explanations = []
    for what, faulty in faulty_references(reference):
        if quantized and faulty.policy.formats != reference.policy.formats:
            continue
        # The rounding of the reference engine counts, because a faulty reference may be more sensitive to rounding.
        record = _compared(comparer, sequence, faulty).model_copy(update={"rounding": own.rounding})
        times = record.times_allowed(comparer.reference.limit)
        if math.isfinite(times) and times <= limit:
            explanations.append((times, Explanation(what=what, kl=or_infinite(record.engine.kl_mean))))
    return min(explanations, key=lambda part: part[0])[1] if explanations else None


def _compared(comparer: SequenceComparer, sequence: ForcedSequence, engine: TorchEngine) -> ComparedRequest:
    """Compare a sequence with another `TorchEngine` instead of the reference engine."""
    other = replace(comparer, reference=replace(comparer.reference, engine=engine))
    ((replay, _),) = other.replay([sequence])
    record = other.compare(sequence, replay, problem="").record
    # The error of a stored vector is negative if it is closer to the computed vector than the faulty reference's own codes are,
    # for example because the faulty reference rounds its codes to zero.
    stored, layers = record.engine.stored_mean, tuple(map(abs, record.engine.stored_by_layer))
    changes = {"stored_mean": None if stored is None else abs(stored), "stored_by_layer": layers}
    return record.model_copy(update={"engine": record.engine.model_copy(update=changes)})
