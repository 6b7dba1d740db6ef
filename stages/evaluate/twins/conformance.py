"""Compares an engine with its twin, the oracle under the same policy, on requests of its own forced decode.

The logits are those of the steps that were judged: same batch, same order. Where the engine shows what it stored, the twin
replays each request over that (`stages.engines.oracle.replay`); where it does not, over its own codes.

Legend: R = decoded tokens of a request, V = vocab_size, H = KV heads.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape, Side
from pipeline.core.records import StoredCopy
from pipeline.verdict.conformance import (
    ALLOWED,
    ComparedRequest,
    Deviation,
    Distance,
    EngineConformance,
)
from pipeline.verdict.record import finite
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.replay import Replay
from stages.evaluate.decoding.batches import Logits, Step
from stages.evaluate.decoding.decode import decode, shares
from stages.evaluate.decoding.rows import Run
from stages.evaluate.distances.distance import Array, Distributions, head_kl, kl_of_logits
from stages.evaluate.distances.scores import SampleHeads
from stages.evaluate.inputs.tokens import EncodedSample
from stages.evaluate.twins.deviation import Compared, Request, first_deviation
from stages.evaluate.twins.explanation import FAR, explained, explained_by_codes
from stages.evaluate.twins.twin import Twin


class Comparison:
    """Takes the steps of a forced decode, and compares each chosen request with the twin when its last token was decoded."""

    def __init__(
        self,
        engine: Engine,
        twin: Twin,
        run: Run,
        chosen: Collection[int],
        *,
        batch_size: int,
        limit: float = ALLOWED,
        layers: tuple[float, ...] = (),
    ) -> None:
        """Prepare a comparison.

        Args:
            engine: The engine that decodes.
            twin: Its twin.
            run: The samples that it decodes, and the FP16 baseline's heads of them, for what the policy itself costs.
            chosen: Indices of those that are compared.
            batch_size: Most sequences of a step, which decides whether prefixes are prefilled by themselves.
            limit: The roundings from which on a deviation is located.
            layers: How far what the 16-bit engine stores is off, by layer, where that says what a rounding is.
        """
        self.engine, self.twin, self.run, self.chosen = engine, twin.of(engine), run, set(chosen)
        self.batch_size, self.limit, self.layers = batch_size, limit, layers
        self.records: dict[int, ComparedRequest] = {}
        self.worst = 1.0
        """How many times what is allowed the worst request is off, 1 at least; the two below are of that request."""
        self.deviation: Deviation | None = None
        self._worst: tuple[int, Logits, list[dict[Side, StoredCopy]]] | None = None
        """Its index, the engine's logits (R, V), and what it shows of its cache."""
        self._requests: dict[int, Request] = {}

    def take(self, step: Step) -> None:
        """Take a step while its sequences are live."""
        for row, (i, position) in enumerate(zip(step.samples, step.positions, strict=True)):
            if i not in self.chosen:
                continue
            request = self._requests.setdefault(i, Request())
            request.logits.append(step.logits_BV[row].copy())
            request.places.append(None if step.rows is None else (step.rows[row], step.size))
            last = position + 1 == len(self.run.encoded[i].reference)
            looked = last or self._frees_a_page(i, position)
            if looked and step.sequences is not None and self.engine.can(Engine.stored):
                _merge(request.layers, self.engine.stored(step.sequences[row]))
            elif last and step.request is not None and self.engine.can(Engine.stored_request):
                request.layers += [dict(layer) for layer in self.engine.stored_request(step.request)]
            if last:
                self.run.progress("compared with the twin [requests]", len(self.records), len(self.chosen))
                self._compare(i, self._requests.pop(i))

    def decode_missing(self) -> None:
        """Decode the chosen samples that were not compared: all, or those that had finished before an interruption."""
        missing = sorted(self.chosen - self.records.keys())
        for event in decode(self.engine, self.run.encoded, self.batch_size, chosen=missing):
            if isinstance(event, Step):
                self.take(event)

    @property
    def requests(self) -> list[ComparedRequest]:
        """What was compared, in the order of the samples."""
        return [self.records[i] for i in sorted(self.records)]

    def result(self) -> EngineConformance:
        """Return what came of it, with what the worst request says of an engine that deviates."""
        worst = {} if self._worst is None else self._described(*self._worst)
        return EngineConformance(
            policy=self.engine.policy.name,
            requests=self.requests,
            deviation=self.deviation,
            limit=self.limit if self.twin.measures else None,
            **worst,
        )

    def _frees_a_page(self, i: int, position: int) -> bool:
        """Whether a page may leave the window or be evicted with the next token: it is read before."""
        length, policy = len(self.run.encoded[i].prompt) + position, self.engine.policy
        frees = policy.window is not None or policy.latest_tokens(self.engine.shape) is not None
        return frees and (position == 0 or (length + 1) % PAGE_TOKENS == 0)

    def _compare(self, i: int, request: Request) -> None:
        item = self.run.encoded[i]
        problem = _problem(request.layers, self.engine.policy, self.engine.shape, len(item.prompt) + len(item.reference) - 1)
        replay = self._replay(item, [] if problem else request.layers)
        compared = _distances(item, np.stack(request.logits), replay, problem)
        if self.twin.measures and any(compared.errors):
            compared = _by_layer(compared, self.layers)
        self.records[i] = compared.record
        times = compared.record.times_allowed(self.limit)
        if times > self.worst:
            self.worst = times
            self.deviation = first_deviation(item, request, compared, self.limit)
            self._worst = i, np.stack(request.logits), [] if problem else request.layers

    def _described(self, i: int, logits_RV: Logits, layers: list[dict[Side, StoredCopy]]) -> dict[str, Any]:
        """Return how far a request is from the twin over its own cache, the twin from FP16, and what the engine may compute."""
        item = self.run.encoded[i]
        alone = self._replay(item, []).logits
        kl = finite(kl_of_logits(alone, logits_RV).mean())
        explanation = explained(self.twin, item, logits_RV, kl)
        if explanation is None and self.twin.measures and layers:
            explanation = explained_by_codes(self.twin, item, logits_RV, lambda oracle: self._replay(item, layers, oracle))
        twin_kl = None if self.run.heads is None else finite(_kl_of_heads(self.run.heads(item.sample.id), alone, item))
        return {"kl": kl, "twin_kl": twin_kl, "explanation": explanation}

    def _replay(
        self, item: EncodedSample, layers: Sequence[Mapping[Side, StoredCopy]], oracle: OracleEngine | None = None
    ) -> Replay:
        """Replay a request on the twin, or on another oracle."""
        shared = item.shared if shares(self.engine, self.batch_size) else 0
        pieces = [piece for piece in (shared, len(item.prompt) - 1 - shared) if piece]
        return self.twin.replay([*item.prompt, *item.reference[:-1]], pieces, layers, oracle)


def spread(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of `count` samples of every workload, from its shortest to its longest.

    One of each is the shortest of the first workload, the longest of the last, and between them of the others.
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


def _merge(layers: list[dict[Side, StoredCopy]], shown: Sequence[Mapping[Side, StoredCopy]]) -> None:
    """Add what an engine shows to what it showed before: pages that it has freed since stay."""
    if not layers:
        layers += [dict(layer) for layer in shown]
        return
    for held, layer in zip(layers, shown, strict=True):
        for side, copy in layer.items():
            held[side] = _after(held[side], copy)


def _after(before: StoredCopy, copy: StoredCopy) -> StoredCopy:
    """Return a copy with the tokens of an earlier look in place of those that it has lost since."""
    # Of a window the first tokens go, of an evicting cache those after its sinks, which it shows as zeros.
    start, stop = copy.evicted
    count = stop if stop > start else copy.first - before.first
    if count <= 0 or count > before.codes.shape[1]:
        return copy
    skipped = count if stop > start else 0

    def joined(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
        return None if old is None or new is None else np.concatenate([old[:, :count], new[:, skipped:]], axis=1)

    codes = joined(before.codes, copy.codes)
    assert codes is not None
    return StoredCopy(
        before.first, codes, joined(before.scale, copy.scale), joined(before.zero, copy.zero),
        copy.static_scale, copy.static_zero, before.evicted,
    )  # fmt: skip


def _problem(layers: Sequence[Mapping[Side, StoredCopy]], policy: KVPolicy, shape: KVShape, tokens: int) -> str:
    """Say how what an engine shows cannot be the policy's; empty where it can, and where it shows nothing."""
    for number, layer in enumerate(layers):
        for side, form in policy.sides(number).items():
            where = f"layer {number} {side}s"
            if side not in layer:
                return f"{where} are not stored"
            copy, scales = layer[side], form.scales_per_token(shape.head_dim)
            width = copy.codes.shape[2] + sum(
                part.itemsize * part.shape[2] for part in (copy.scale, copy.zero) if part is not None
            )
            if width != form.token_bytes(shape.head_dim) or (copy.scale is None) != (scales == 0):
                expected = form.token_bytes(shape.head_dim)
                return f"{where} take {width} bytes a token and head, {form.dtype} takes {expected}"
            if (copy.static_scale is None) == form.has_static_scales:
                return f"{where} have {'no' if form.has_static_scales else 'a'} static scale"
            if not side.in_window and (copy.first, copy.codes.shape[1]) != (0, tokens):
                return f"{where} hold {copy.codes.shape[1]} tokens of {tokens}"
            (start, stop), allowed = copy.evicted, policy.evicted_pages(tokens, shape)
            if stop > start and not allowed.start * PAGE_TOKENS <= start < stop <= allowed.stop * PAGE_TOKENS:
                return f"{where} have lost tokens {start} to {stop - 1}, some of which the policy keeps"
    return ""


def _distances(item: EncodedSample, logits_RV: Logits, replay: Replay, problem: str) -> Compared:
    kl, rounding_kl = kl_of_logits(replay.logits, logits_RV), kl_of_logits(replay.logits, replay.disturbed)
    errors = [copy for layer in replay.errors for copy in layer.values() if copy.engine.numel()]

    def distance(kl_R: Array, stored: Sequence[Tensor]) -> Distance:
        return Distance(
            kl_mean=finite(kl_R.mean()),
            kl_max=finite(kl_R.max()),
            stored_error=finite(max((float(part.max()) for part in stored), default=0.0)),
            stored_mean=finite(float(torch.cat([part.flatten() for part in stored]).mean())) if stored else 0.0,
        )

    record = ComparedRequest(
        sample=item.sample.id,
        prompt_tokens=len(item.prompt),
        decoded_tokens=len(item.reference),
        engine=distance(kl, [copy.engine for copy in errors]),
        rounding=distance(rounding_kl, [copy.disturbed for copy in errors]),
        problem=problem,
    )
    return Compared(record, kl, replay.errors)


def _by_layer(compared: Compared, rounding: tuple[float, ...]) -> Compared:
    """Return a compared request with the mean errors of each layer, beside those of the 16-bit engine.

    The disturbed twin's stand in their place where they are larger: the sign of a scale of q4_0 turns with the last place of a
    block's two largest numbers, and all codes of the block with it.
    """

    def means_of(part: str) -> tuple[float, ...]:
        joined = (torch.cat([getattr(copy, part).flatten() for copy in layer.values()]) for layer in compared.errors)
        return tuple(float(errors.mean().nan_to_num(nan=FAR, posinf=FAR)) for errors in joined)

    means, record = means_of("engine"), compared.record
    rounding = tuple(map(max, rounding, means_of("disturbed")))
    engine = record.engine.model_copy(update={"stored_by_layer": means})
    beside = record.rounding.model_copy(update={"stored_by_layer": rounding})
    return replace(compared, record=record.model_copy(update={"engine": engine, "rounding": beside}))


def _kl_of_heads(heads: SampleHeads, twin_RV: Logits, item: EncodedSample) -> float:
    """Mean KL(FP16 baseline || twin) of a request's decoded tokens, over the baseline's heads."""
    twins = Distributions(twin_RV)
    return float(np.mean([head_kl(heads.head(n), twins, n) for n in range(len(item.reference))]))
