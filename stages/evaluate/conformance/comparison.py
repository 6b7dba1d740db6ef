"""Compares an engine with its reference engine on requests of the engine's forced decode.

The compared logits come from the judged decode steps, with the same batches in the same order. If the engine shows its stored
codes, the reference engine replays a request over these codes (`stages.engines.reference.replay`), otherwise over its
own codes.

Legend: R = decoded tokens of a request, V = vocab_size, H = KV heads.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from stages.core.records import StoredCopy
from stages.engines.interface import Engine
from stages.engines.reference.attention import Fed
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.replay import Replay
from stages.evaluate.conformance.deviation import first_deviation
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.explanation import explained, explained_by_codes
from stages.evaluate.conformance.request import Request, loses_pages, problem_of
from stages.evaluate.decoding.batches import DecodeStep, Logits
from stages.evaluate.decoding.decode import decode, shares
from stages.evaluate.decoding.rows import SampleRun
from stages.evaluate.distances.distance import Distributions, head_kl, kl_of_logits
from stages.evaluate.distances.scores import SampleHeads
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import PAGE_TOKENS, Side
from stages.verdict.conformance import (
    ALLOWED,
    ComparedRequest,
    Deviation,
    EngineConformance,
)
from stages.verdict.record import finite


class Comparison:
    """Compares chosen requests of a forced decode with the reference engine, when their last token is decoded."""

    def __init__(
        self,
        engine: Engine,
        reference: ReferenceEngine,
        run: SampleRun,
        chosen: Collection[int],
        *,
        batch_size: int,
        limit: float = ALLOWED,
        layers: tuple[float, ...] = (),
    ) -> None:
        """Prepare a comparison.

        Args:
            engine: The engine under test.
            reference: Its reference engine.
            run: The samples, and the FP16 baseline's heads to measure the cost of the policy itself.
            chosen: Indices of the samples to compare.
            batch_size: Maximum sequences per step. It determines whether the engine prefills shared prefixes separately.
            limit: Distance in roundings above which a deviation is located.
            layers: The 16-bit engine's errors of stored vectors by layer, if a rounding is measured.
        """
        self.engine, self.reference, self.run, self.chosen = engine, reference.run_as(engine), run, set(chosen)
        self.batch_size, self.limit, self.layers = batch_size, limit, layers
        self.records: dict[int, ComparedRequest] = {}
        self.worst = 1.0
        """Worst figure of any request as a multiple of its allowed maximum, at least 1."""
        self.deviation: Deviation | None = None
        """First deviation in the worst request; None if no request exceeds its limit."""
        self._worst: tuple[int, Logits, list[dict[Side, StoredCopy]]] | None = None
        """Index, engine logits (R, V) and stored layers of the worst request."""
        self._requests: dict[int, Request] = {}

    def take(self, step: DecodeStep) -> None:
        """Record a step. Call it while the sequences of the step are live."""
        for row, (i, position) in enumerate(zip(step.samples, step.positions, strict=True)):
            if i not in self.chosen:
                continue
            item = self.run.encoded[i]
            request = self._requests.setdefault(i, Request(item.sample.id))
            length, last = len(item.prompt) + position, position + 1 == len(item.reference)
            request.row(step.logits_BV[row], length - 1, None if step.rows is None else (step.rows[row], step.size))
            frees = loses_pages(self.engine) and (position == 0 or (length + 1) % PAGE_TOKENS == 0)
            if (last or frees) and step.sequences is not None and self.engine.can(Engine.stored):
                request.observe(self.engine.stored(step.sequences[row]))
            elif last and step.request is not None and self.engine.can(Engine.stored_request):
                request.observe(self.engine.stored_request(step.request))
            if last:
                self.run.progress("compared with the reference engine [requests]", len(self.records), len(self.chosen))
                self._compare(i, self._requests.pop(i))

    def decode_missing(self) -> None:
        """Decode and compare chosen samples that are not compared yet, for example because of an interruption."""
        missing = sorted(self.chosen - self.records.keys())
        for event in decode(self.engine, self.run.encoded, self.batch_size, chosen=missing):
            if isinstance(event, DecodeStep):
                self.take(event)

    @property
    def requests(self) -> list[ComparedRequest]:
        """Compared requests in the order of the samples."""
        return [self.records[i] for i in sorted(self.records)]

    def result(self) -> EngineConformance:
        """Return the result; if the engine deviates, it includes details about the worst request."""
        worst = {} if self._worst is None else self._described(*self._worst)
        return EngineConformance(
            policy=self.engine.policy.name,
            requests=self.requests,
            deviation=self.deviation,
            limit=self.limit if self.reference.measures else None,
            **worst,
        )

    def _compare(self, i: int, request: Request) -> None:
        item = self.run.encoded[i]
        problem = problem_of(request.layers, self.engine.policy, self.engine.shape, len(item.prompt) + len(item.reference) - 1)
        replay = self._replay(item, [] if problem else request.layers)
        compared = request.compared(replay, len(item.prompt), len(item.reference), self.engine.policy, problem)
        if self.reference.measures and any(compared.errors):
            compared = compared.by_layer(self.layers)
        self.records[i] = compared.record
        times = compared.record.times_allowed(self.limit)
        if times > self.worst:
            self.worst = times
            self.deviation = first_deviation(request, compared, self.limit)
            self._worst = i, np.stack(request.logits), [] if problem else request.layers

    def _described(self, i: int, logits_RV: Logits, layers: list[dict[Side, StoredCopy]]) -> dict[str, Any]:
        """Return details of a request: KL from reference to engine, KL from FP16 to reference, and a possible explanation."""
        item = self.run.encoded[i]
        alone = self._replay(item, []).logits
        kl = finite(kl_of_logits(alone, logits_RV).mean())
        explanation = explained(self.reference, item, logits_RV, kl)
        if explanation is None and self.reference.measures and layers:
            explanation = explained_by_codes(self.reference, item, logits_RV, lambda other: self._replay(item, layers, other))
        twin_kl = None if self.run.heads is None else finite(_kl_of_heads(self.run.heads(item.sample.id), alone, item))
        return {"kl": kl, "twin_kl": twin_kl, "explanation": explanation}

    def _replay(
        self, item: EncodedSample, layers: Sequence[Mapping[Side, StoredCopy]], torch_engine: TorchEngine | None = None
    ) -> Replay:
        """Replay a request on the reference engine or another `TorchEngine`."""
        shared = item.shared if shares(self.engine, self.batch_size) else 0
        pieces = [piece for piece in (shared, len(item.prompt) - 1 - shared) if piece]
        prompt, rows = [(piece, False) for piece in pieces], len(item.reference)
        fed = Fed([*item.prompt, *item.reference[:-1]], [*prompt, (rows, True)])
        return self.reference.replay([fed], [layers], torch_engine)[0].tail(rows)


def spread(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of `count` samples per workload, evenly spread from the shortest to the longest.

    If `count` is 1, the first workload contributes its shortest sample, the last its longest, and the others lengths between.
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


def _kl_of_heads(heads: SampleHeads, reference_RV: Logits, item: EncodedSample) -> float:
    """Return the mean KL(FP16 baseline || reference engine) of a request's decoded tokens, over the baseline's heads."""
    references = Distributions(reference_RV)
    return float(np.mean([head_kl(heads.head(n), references, n) for n in range(len(item.reference))]))
