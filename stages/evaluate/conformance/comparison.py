"""Compares requests of an engine's forced decode with the reference engine (conformance).

The compared logits come from the decode steps that the evaluation judges: only an interruption needs another decode.

A faulty reference is a reference engine with a known mistake in writing or reading its cache. If a deviating engine is much
closer to a faulty reference than to the reference engine, it probably makes the same mistake.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from stages.core.records import Progress, no_progress, or_infinite
from stages.engines.reference.cache import Storage
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import quantize
from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.decode import DecodeStep, decode, shares
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.policy import FP16_POLICY
from stages.verdict.conformance import ComparedRequest, Deviation, EngineConformance, Explanation

CLOSER = 4.0
"""A faulty reference explains an engine if the engine is at least this many times closer to it than to the reference engine."""


@dataclass
class ForcedDecodeComparison:
    """Compares chosen requests of a forced decode with the reference engine, each once its last token is decoded."""

    comparer: SequenceComparer
    encoded: Sequence[EncodedSample]
    chosen: Set[int]
    """Indices of the samples to compare."""
    batch_size: int
    """Maximum sequences per step. It determines whether the engine prefills shared prefixes separately."""
    progress: Progress = no_progress
    """Called with the number of compared requests."""
    records: dict[int, ComparedRequest] = field(default_factory=dict, init=False)
    worst: float = field(default=1.0, init=False)
    """Worst figure of any request as a multiple of its allowed maximum, at least 1."""
    deviation: Deviation | None = field(default=None, init=False)
    """First deviation in the worst request; None if no request exceeds its limit."""
    _worst: ForcedSequence | None = field(default=None, init=False)
    _live: dict[int, ForcedSequence] = field(default_factory=dict, init=False)

    def take(self, step: DecodeStep) -> None:
        """Record a step. Call it while the sequences of the step are live."""
        for token, logits_V in zip(step.tokens, step.logits_BV, strict=True):
            i, position = token.sample, token.position
            if i not in self.chosen:
                continue
            item = self.encoded[i]
            if i not in self._live:
                self._live[i] = self._prefilled(item)
            sequence = self._live[i]
            fed = item.reference[position - 1] if position else item.prompt[-1]
            place = None if token.row is None else (token.row, step.size)
            sequence.feed([fed], logits_V, place, decoded=True)
            last = position + 1 == len(item.reference)
            frees = self.comparer.frees_pages and (position == 0 or self.comparer.frees_next(sequence))
            if token.sequence is not None and (last or frees):
                self.comparer.observe(sequence, token.sequence)
            elif step.request is not None and last:
                self.comparer.observe_request(sequence, step.request)
            if last:
                self.progress("compared with the reference engine [requests]", len(self.records), len(self.chosen))
                self._compare(i, self._live.pop(i))

    def decode_missing(self) -> None:
        """Decode and compare chosen samples that are not compared yet, for example because of an interruption."""
        missing = sorted(self.chosen - self.records.keys())
        for event in decode(self.comparer.engine, self.encoded, self.batch_size, chosen=missing):
            if isinstance(event, DecodeStep):
                self.take(event)

    def result(self) -> EngineConformance:
        return EngineConformance(
            policy=self.comparer.engine.policy.name,
            requests=[self.records[i] for i in sorted(self.records)],
            deviation=self.deviation,
            limit=self.comparer.reference.limit,
            explanation=None if self._worst is None else find_explanation(self.comparer, self._worst),
        )

    def _prefilled(self, item: EncodedSample) -> ForcedSequence:
        """Return the sequence after its prefill, which excludes the prompt's last token."""
        shared = item.shared if shares(self.comparer.engine, self.batch_size) else 0
        pieces = [(piece, False) for piece in (shared, len(item.prompt) - 1 - shared) if piece]
        return ForcedSequence(item.sample.id, list(item.prompt), tokens=list(item.prompt[:-1]), pieces=pieces)

    def _compare(self, i: int, sequence: ForcedSequence) -> None:
        ((replay, problem),) = self.comparer.replay([sequence])
        compared = self.comparer.compare(sequence, replay, problem)
        self.records[i] = compared.record
        times = compared.record.times_allowed(self.comparer.reference.limit)
        if times > self.worst:
            self.worst = times
            self._worst = sequence
            self.deviation = self.comparer.first_deviation(sequence, compared)


def spread(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of `count` samples per workload, evenly spread from the shortest to the longest.

    If `count` is 1, the first workload contributes its shortest sample, the last (or only) workload its longest, and the
    workloads between them samples of intermediate length.
    """
    workloads: dict[str, list[int]] = {}
    for i, item in enumerate(encoded):
        workloads.setdefault(item.sample.workload, []).append(i)
    chosen: set[int] = set()
    for number, members in enumerate(workloads.values()):
        members.sort(key=lambda i: len(encoded[i].prompt) + len(encoded[i].reference))
        alone = number / (len(workloads) - 1) if len(workloads) > 1 else 1.0
        shares_of = np.linspace(0, 1, count) if count > 1 else [alone][:count]
        chosen |= {members[round(share * (len(members) - 1))] for share in shares_of}
    return sorted(chosen)


class TowardsZero(Storage):
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

    The engine must conform to the faulty reference, or be CLOSER times nearer to it than to the reference engine. If the
    engine's codes have the policy's formats, faulty references with other formats are excluded.
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
    other = replace(comparer, reference=replace(comparer.reference, engine=engine))
    ((replay, _),) = other.replay([sequence])
    record = other.compare(sequence, replay, problem="").record
    # The error of a stored vector is negative if it is closer to the computed vector than the faulty reference's own codes are,
    # for example because the faulty reference rounds its codes to zero.
    stored, layers = record.engine.stored_mean, tuple(map(abs, record.engine.stored_by_layer))
    changes = {"stored_mean": None if stored is None else abs(stored), "stored_by_layer": layers}
    return record.model_copy(update={"engine": record.engine.model_copy(update=changes)})
