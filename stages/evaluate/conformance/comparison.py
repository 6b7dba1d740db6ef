"""Compares requests of an engine's forced decode with the reference engine (conformance).

The compared logits come from the decode steps that the evaluation judges: only an interruption needs another decode.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from stages.core.records import Progress, no_progress
from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.decode import DecodeStep, decode, shares
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.conformance import ComparedRequest, Deviation, EngineConformance


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
