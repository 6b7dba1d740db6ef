"""Compares an engine's sequences with replays on the reference engine. Conformance and the stress test share these rules.

The reference engine is a `TorchEngine` with the policy, scales and weights of the engine under test. It replays a sequence over
the codes that the engine stored (`stages.engines.reference.replay`), or over its own codes if the engine does not expose its
cache.

A number halfway between two codes may get either code, depending on earlier rounding errors. With a coarse cache, a few flipped
codes change the logits more than some faults do. The reference engine therefore also computes logits with activations that are
disturbed by a rounding error. The distance between the two results is the unit of the allowed distance.

Legend: R = rows of logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from stages.core.records import finite, or_infinite
from stages.engines.backend import ROUNDING
from stages.engines.interface import Engine, SupportsStored, SupportsStoredRequest
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.replay import Errors, Replay
from stages.evaluate.conformance.sequence import ForcedSequence, count_equal_first
from stages.evaluate.distances.distance import Array, kl_of_logits
from stages.policies.policy import PAGE_TOKENS, Side
from stages.policies.spec import E4M3
from stages.verdict.conformance import (
    ALLOWED,
    E4M3_SCALE_STEP,
    MEAN_STEP,
    MEASURED_ALLOWED,
    MIN_KL,
    SCALE_STEP,
    STORED_ALLOWED,
    ComparedRequest,
    Deviation,
    Distance,
    EngineConformance,
    allowed,
    allowed_in_layer,
)

MIN_MEASURED = 1 / 16
"""Minimum of a measured rounding as a fraction of the assumed rounding, because a few samples may agree by chance."""

NOTICED = 8.0
"""Distance in roundings above which a token's logits count as wrong when a deviation is located. Sound engines stay below."""

FAR = 1e6
"""Error of a layer with stored vectors that are not finite."""


@dataclass(frozen=True)
class ReferenceEngine:
    engine: TorchEngine
    assumed_rounding: float | None = ROUNDING["float32"]
    """Rounding error of a layer's output, relative to its root mean square, as `Backend.rounding` gives it. None if the
    engine's arithmetic differs from the reference engine's by design."""
    measures_rounding: bool = False
    """Whether to measure a rounding as the baseline's distance from its reference engine. This is needed for libraries that sum
    16-bit numbers in their own order: twice the epsilon per layer would be large enough to hide cache faults."""
    measured_rounding: float | None = None
    """The measured rounding; None if it is assumed."""
    limit: float = ALLOWED
    """Maximum distance of a sequence from the reference engine, in roundings."""
    layer_errors: tuple[float, ...] = ()
    """The 16-bit engine's mean errors of stored vectors by layer, if a rounding is measured."""

    @property
    def rounding(self) -> float:
        if self.measured_rounding is not None:
            return self.measured_rounding
        if self.assumed_rounding is not None:
            return self.assumed_rounding
        # If a rounded query gets the neighbouring code, its token's result changes by less than a float16 rounding.
        return ROUNDING["float16" if self.engine.rounds_queries else "float32"]

    def with_limits_of(self, baseline: EngineConformance | None) -> "ReferenceEngine":
        """Return this with a candidate's limits. `baseline`: the baseline's conformance; None compares the baseline itself."""
        requests = [] if baseline is None else baseline.requests
        if not self.measures_rounding:
            return replace(self, limit=allowed(requests))
        worst = max((request.roundings for request in requests), default=1.0)
        stored = [request.engine.stored_by_layer for request in requests if request.engine.stored_by_layer]
        return replace(
            self,
            measured_rounding=self.rounding * min(1.0, max(worst, MIN_MEASURED)),
            limit=MEASURED_ALLOWED,
            layer_errors=tuple(map(max, zip(*stored, strict=True))),
        )

    @property
    def model_tokens(self) -> int | None:
        """Maximum positions according to the model's config; None if the config has no such value."""
        positions: int | None = getattr(self.engine.model.config, "max_position_embeddings", None)
        return positions

    @property
    def special_tokens(self) -> list[int]:
        """Tokens that the model's config names as the begin or end of a text, or as padding."""
        config = self.engine.model.config
        named = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
        ids = [token for name in named for token in (name if isinstance(name, list) else [name])]
        return [token for token in dict.fromkeys(ids) if isinstance(token, int) and 0 <= token < self.engine.vocab_size]


@dataclass(frozen=True)
class ComparedSequence:
    record: ComparedRequest
    kl: Array
    """KL by row (R), in nats."""
    errors: list[dict[Side, Errors]]


@dataclass(frozen=True)
class SequenceComparer:
    engine: Engine
    reference: ReferenceEngine

    def __post_init__(self) -> None:
        reference = self.reference.engine
        reference.prefill_chunk, reference.reads_itself = self.engine.prefill_chunk, self.engine.reads_itself

    @property
    def frees_pages(self) -> bool:
        """Whether live sequences free pages (eviction or window). Their codes must be recorded before that."""
        return self.engine.policy.window is not None or self.engine.policy.latest_tokens(self.engine.shape) is not None

    def frees_next(self, sequence: ForcedSequence) -> bool:
        return self.frees_pages and (len(sequence.tokens) + 1) % PAGE_TOKENS == 0

    def observe(self, sequence: ForcedSequence, handle: int) -> None:
        """Record the stored codes of a live sequence, if the engine exposes them."""
        if isinstance(self.engine, SupportsStored):
            sequence.observe(self.engine.stored(handle))

    def observe_request(self, sequence: ForcedSequence, number: int) -> None:
        """Record the stored codes of a request of the last `forced_together`, if exposed."""
        if isinstance(self.engine, SupportsStoredRequest):
            sequence.observe(self.engine.stored_request(number))

    def replay(self, sequences: Sequence[ForcedSequence], *, disturbed: bool = True) -> list[tuple[Replay, str]]:
        """Replay sequences together. Tokens that a fork shares with its origin are computed once.

        Return (replay, problem) per sequence. If the stored codes have a problem (see `problem`), they are not used.
        """
        problems, chunk = [self.problem(sequence) for sequence in sequences], self.engine.prefill_chunk
        caches = [[] if problem else sequence.layers for sequence, problem in zip(sequences, problems, strict=True)]
        feds = [sequence.fed for sequence in sequences]
        origins = [(0, 0)] * len(sequences)
        for number, sequence in enumerate([] if any(problems) else sequences):
            alike = [count_equal_first(sequence.tokens, other.tokens) for other in sequences[:number]]
            for i in sorted(filter(alike.__getitem__, range(number)), key=lambda i: -alike[i]):
                if count := sequence.shared_tokens(sequences[i], chunk):
                    origins[number] = i, count
                    break
        rounding = self.reference.rounding if disturbed else 0.0
        replays = self.reference.engine.replay(feds, caches, rounding=rounding, origins=origins)
        return list(zip(replays, problems, strict=True))

    def compare(self, sequence: ForcedSequence, replay: Replay, problem: str) -> ComparedSequence:
        policy, replay = self.engine.policy, replay.tail(len(sequence.logits))
        kl = kl_of_logits(replay.logits, np.stack(sequence.logits))
        by_layer = rounding = tuple[float, ...]()
        kl_disturbed = kl_of_logits(replay.logits, replay.disturbed) if replay.measured else np.zeros_like(kl)
        if self.reference.measures_rounding and any(replay.errors):
            by_layer = _means(replay.errors, "engine")
            # A rounding may change more than the 16-bit engine's error shows: if it swaps the two largest numbers of a q4_0
            # block, the sign of the block's scale and all of its codes change.
            rounding = tuple(map(max, self.reference.layer_errors, _means(replay.errors, "disturbed")))

        def distance(kl_R: Array, part: str, stored_by_layer: tuple[float, ...]) -> Distance:
            errors = [getattr(copy, part).flatten() for layer in replay.errors for copy in layer.values()]
            stored = torch.cat([*errors, torch.zeros(0)])
            return Distance(
                kl_mean=finite(kl_R.mean()),
                kl_max=finite(kl_R.max()),
                stored_error=finite(float(stored.max())) if len(stored) else 0.0,
                stored_mean=finite(float(stored.mean())) if len(stored) else 0.0,
                stored_by_layer=stored_by_layer,
            )

        record = ComparedRequest(
            sample=sequence.name,
            prompt_tokens=len(sequence.prompt),
            decoded_tokens=sequence.decoded,
            engine=distance(kl, "engine", by_layer),
            rounding=distance(kl_disturbed, "disturbed", rounding),
            problem=problem,
            scale_step=max(E4M3_SCALE_STEP if form.code.scale_storage is E4M3 else SCALE_STEP for _, form in policy.formats),
        )
        return ComparedSequence(record, kl, replay.errors)

    def problem(self, sequence: ForcedSequence) -> str:
        """Return how the stored codes contradict the policy; "" if they do not, or if the engine does not expose them."""
        policy, shape, tokens = self.engine.policy, self.engine.shape, len(sequence.tokens)
        for number, layer in enumerate(sequence.layers):
            for side, form in policy.sides(number).items():
                where, expected = f"layer {number} {side}s", form.token_bytes(shape.head_dim)
                if side not in layer:
                    return f"{where} are not stored"
                copy = layer[side]
                scales = [part for part in (copy.scale, copy.zero) if part is not None]
                width = copy.codes.shape[2] + sum(part.itemsize * part.shape[2] for part in scales)
                if width != expected or (copy.scale is None) != (form.scales_per_token(shape.head_dim) == 0):
                    return f"{where} take {width} bytes a token and head, {form.dtype} takes {expected}"
                if (copy.static_scale is None) == form.has_static_scales:
                    return f"{where} have {'no' if form.has_static_scales else 'a'} static scale"
                if not side.in_window and (copy.first, copy.codes.shape[1]) != (0, tokens):
                    return f"{where} hold {copy.codes.shape[1]} tokens of {tokens}"
                allowed = policy.evicted_pages(tokens, shape)
                for start, stop in () if side.in_window else copy.evicted:  # a window records its own gaps as evicted
                    if not allowed.start * PAGE_TOKENS <= start < stop <= allowed.stop * PAGE_TOKENS:
                        return f"{where} have lost tokens {start} to {stop - 1}, some of which the policy keeps"
        return ""

    def first_deviation(self, sequence: ForcedSequence, compared: ComparedSequence) -> Deviation:
        """Locate the first position at which a sequence deviates, and the faulty operation.

        The replay uses the engine's own codes, so an error does not spread to later tokens. A wrong code changes no logits. A
        wrong read changes the logits of its step, and the vectors that higher layers store for its token.
        """
        positions = sequence.positions
        rows = [positions[row] for row in self._wrong_rows(compared)]
        limits = _stored_limits(compared.record, len(compared.errors))
        wrong = sorted(
            (copy.first + token, layer, side, head)
            for layer, copies in enumerate(compared.errors)
            for side, copy in copies.items()
            for head, token in (copy.engine > limits[layer]).nonzero().tolist()
        )
        position = min(rows[:1] + [place[0] for place in wrong[:1]], default=positions[0])
        operation: Literal["stored", "read", "computed"] = "stored"
        layer, side, head = wrong[0][1:] if wrong and wrong[0][0] == position else (None, None, None)
        if layer is None or position in rows:
            operation, side, head = "computed", None, None
            # A wrong read shows in the vectors of the next layer, or in the logits if the last layer misread.
            if any(compared.errors):
                operation = "read"
                layer = len(compared.errors) - 1 if layer is None else max(0, layer - 1)
            else:
                layer = None
        place = sequence.places[positions.index(position)] if position in positions else None
        batch_row, batch_size = place or (None, None)
        return Deviation(
            sample=sequence.name,
            position=position,
            page_offset=position % PAGE_TOKENS,
            batch_row=batch_row,
            batch_size=batch_size,
            operation=operation,
            layer=layer,
            side=side,
            head=head,
        )

    def _wrong_rows(self, compared: ComparedSequence) -> list[int]:
        """Return the rows with wrong logits, or the worst row if only the sequence as a whole deviates."""
        unit = (compared.record.rounding.kl_max or 0.0) + MIN_KL
        noticed: list[int] = np.flatnonzero(compared.kl > NOTICED**2 * unit).tolist()
        return noticed or ([int(compared.kl.argmax())] if compared.record.roundings > self.reference.limit else [])


def _means(errors: Sequence[dict[Side, Errors]], part: str) -> tuple[float, ...]:
    joined = (torch.cat([getattr(copy, part).flatten() for copy in layer.values()]) for layer in errors)
    return tuple(float(layer.mean().nan_to_num(nan=FAR, posinf=FAR)) for layer in joined)


def _stored_limits(record: ComparedRequest, layers: int) -> list[float]:
    """Return the error by layer above which a stored vector counts as wrong.

    If layers' means exceed their limits, these limits apply to the layers' vectors, and other layers have no wrong vectors.
    Otherwise all layers have the limit of single vectors, or the limit of the mean if only the mean exceeds its limit.
    """
    engine, rounding, times = record.engine, record.rounding, record.layers_times_allowed
    if any(part > 1 for part in times):
        allowed = map(allowed_in_layer, rounding.stored_by_layer)
        return [limit if part > 1 else math.inf for limit, part in zip(allowed, times, strict=True)]
    single = STORED_ALLOWED * (rounding.stored_error or 0.0) + record.scale_step
    mean = STORED_ALLOWED * (rounding.stored_mean or 0.0) + MEAN_STEP
    only_mean = or_infinite(engine.stored_error) <= single and or_infinite(engine.stored_mean) > mean
    return [mean if only_mean else single] * layers
