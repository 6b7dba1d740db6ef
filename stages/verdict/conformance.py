"""The record of how an engine compares with the reference engine under the same policy, weights and scales.

The unit is a *rounding*. To measure it, the reference engine runs the same tokens with the output of every layer shifted by a
few units in the last place of the engine's type; a rounding is the resulting change of its figures. An engine that computes its
policy is about one rounding from its reference engine; real faults are thousands of roundings away.
"""

import math
from collections.abc import Sequence
from typing import Literal

from stages.core.records import Number, Record, or_infinite

ALLOWED = 64.0
"""Maximum distance of a request's logits, in roundings. 64 roundings have 4,096 times the KL of one. Sound engines show 0.1
to 7."""

MEASURED_ALLOWED = 4.0
"""Maximum distance in measured roundings. One measured rounding is the 16-bit engine's distance from its own reference engine.
A candidate may differ by 4 measured roundings, which is 16 times the KL of one. The 16-bit engine may differ by 4 assumed
roundings."""

LAYER_ALLOWED = 2.0
"""Allowed multiple of the 16-bit engine's error in a layer's stored vectors, if the rounding is measured."""

STORED_ALLOWED = 4.0
"""Allowed multiple of the error that a rounding causes in stored vectors."""

SCALE_STEP = 2.0**-10
"""Maximum change of a stored vector, relative to its length, if its float16 scale changes in the last place.
An error of this size is always allowed, because a scale may round either way."""

E4M3_SCALE_STEP = 2.0**-3
"""SCALE_STEP for E4M3 scales, which differ from their neighbours by up to an eighth. If a block's scale lies halfway between
two scales, either choice is correct. Over 6 million random vectors with such a block, the errors of the two choices differed by
at most 0.095 of the vector's length (by 0.004 in the mean, at a head_dim of 64)."""

MEAN_STEP = 2.0**-13
"""SCALE_STEP for the mean over all stored vectors. It is smaller because few scales lie halfway between two float16 numbers."""

MIN_KL = 1e-13
"""KL in nats below which two float32 distributions count as equal."""


class Distance(Record):
    """The distance of one request from the reference engine. Numbers that are not finite are null."""

    kl_mean: Number
    """KL(reference engine || engine) over the request's decoded tokens, nats."""
    kl_max: Number
    stored_error: Number
    """Largest error of a stored vector beyond the error of the nearest codes, relative to the vector's length. 0 if the engine
    does not expose its cache."""
    stored_mean: Number = 0.0
    """Mean of this error over all stored vectors."""
    stored_by_layer: tuple[float, ...] = ()
    """Mean of this error by layer, if the rounding is measured. `ComparedRequest.engine` holds the
    candidate's error. `ComparedRequest.rounding` holds the larger of two errors: the 16-bit engine's, and the disturbed
    reference engine's. A correct quantizer does not exceed it."""


class ComparedRequest(Record):
    """One request, compared between an engine and its reference engine on the same forced tokens."""

    sample: str
    prompt_tokens: int
    decoded_tokens: int
    engine: Distance
    rounding: Distance
    """Distance of the reference engine from itself with the output of every layer shifted by a rounding."""
    problem: str = ""
    """Property of the engine's cache that contradicts the policy, such as a wrong width or length; empty if none does."""
    scale_step: float = SCALE_STEP
    """Maximum relative change of a stored vector if a scale of this policy changes in the last place."""

    @property
    def roundings(self) -> float:
        """Distance of the logits in roundings, the larger by mean and by maximum KL; infinite if a KL is not finite."""
        pairs = ((self.engine.kl_mean, self.rounding.kl_mean), (self.engine.kl_max, self.rounding.kl_max))
        return max(
            math.inf if kl is None or unit is None else math.sqrt(max(kl, 0.0) / (max(unit, 0.0) + MIN_KL))
            for kl, unit in pairs
        )

    def times_allowed(self, limit: float) -> float:
        """Return the request's worst figure as a multiple of its allowed maximum; `limit` is the maximum in roundings."""
        stored = (
            _times(self.engine.stored_error, self.rounding.stored_error, self.scale_step),
            _times(self.engine.stored_mean, self.rounding.stored_mean, MEAN_STEP),
        )
        return math.inf if self.problem else max(self.roundings / limit, *stored, *self.layers_times_allowed)

    @property
    def layers_times_allowed(self) -> list[float]:
        """Error of the stored vectors by layer, as a multiple of the allowed error; empty if no rounding is measured."""
        pairs = zip(self.engine.stored_by_layer, self.rounding.stored_by_layer, strict=False)
        return [error / allowed_in_layer(rounding) for error, rounding in pairs]


def allowed_in_layer(rounding: float) -> float:
    """Return the error allowed in a layer's stored vectors, given the error `rounding` of the 16-bit engine's vectors."""
    return LAYER_ALLOWED * max(rounding, 0.0) + MEAN_STEP


def _times(error: Number, rounding: Number, step: float) -> float:
    return math.inf if error is None or rounding is None else error / (STORED_ALLOWED * max(rounding, 0.0) + step)


class Deviation(Record):
    """The first deviation of an engine from its reference engine."""

    sample: str
    position: int
    """Position in the sequence, from 0."""
    page_offset: int
    batch_row: int | None
    """Row of the decode step that computed this token; null for a token of the prompt."""
    batch_size: int | None
    operation: Literal["stored", "read", "computed"]
    """stored: the policy would store another vector. read: the decode step of this token misread the cache.
    computed: the logits differ, and the engine does not expose its cache."""
    layer: int | None
    """Layer of the deviation. For "read", the last layer that may have misread its cache: the token's first wrong codes are in
    the next layer."""
    side: str | None
    head: int | None

    def describe(self, sample: str = "") -> str:
        """Return a description of the place. `sample` is inserted after the position."""
        where = f"position {self.position} (page offset {self.page_offset}"
        if self.batch_row is not None:
            where += f", row {self.batch_row} of a batch of {self.batch_size}"
        where += f"){sample}"
        if self.layer is not None:
            head = "" if self.head is None else f" head {self.head}"
            upto = "up to " if self.operation == "read" and self.layer else ""
            where += f", {upto}layer {self.layer}{head}{'' if self.side is None else f' {self.side}s'}"
        return f"first {self.operation} wrong at {where}"


class EngineConformance(Record):
    policy: str
    requests: list[ComparedRequest]
    limit: float = ALLOWED
    """Maximum distance of a request's logits, in roundings."""
    deviation: Deviation | None = None
    """First deviation of the worst request; null if no request is off by more than rounding allows."""

    @property
    def ranked(self) -> list[float]:
        """Each request's worst figure as a multiple of its allowed maximum, the worst request first."""
        return sorted((request.times_allowed(self.limit) for request in self.requests), reverse=True)


class Conformance(Record):
    """The comparisons of candidate and baseline with their reference engines."""

    rounding: float | None
    """Rounding error of a layer's output, relative to its root mean square. Null for engines whose arithmetic differs from the
    reference engine's by design; they are described but not judged."""
    baseline: EngineConformance
    candidate: EngineConformance


def allowed(baseline: Sequence[ComparedRequest]) -> float:
    """Return the maximum distance of a candidate in roundings.

    It grows with the distance of the FP16 baseline, since an error that the baseline shares is not a fault of the policy. A
    baseline that is off by more than ALLOWED fails its own check.
    """
    worst = max((request.roundings for request in baseline), default=1.0)
    return ALLOWED * min(max(1.0, worst), ALLOWED)


def describe(engine: EngineConformance, *, judged: bool) -> str:
    """Return a line on whether an engine computes its policy; if it does not, the line locates the first deviation."""
    policy, ranked = engine.policy, engine.ranked
    if not ranked:
        return "no request was compared with the reference engine (workloads.conformance_samples=0), so no PASS is possible"
    count = len(ranked)
    largest = max(or_infinite(request.engine.kl_max) for request in engine.requests)
    if not judged:
        mean = sum(or_infinite(request.engine.kl_mean) for request in engine.requests) / count
        return (
            f"{policy} uses its own arithmetic; the distance is reported, not judged: KL {mean:.1e} from the reference engine, "
            f"at most {largest:.1e}"
        )
    deviating = sum(times > 1 for times in ranked)
    if not deviating:
        return (
            f"computes {policy} as the reference engine does: none of {count} requests differs by more than rounding "
            f"(KL at most {largest:.1e}, {ranked[0]:.2g} of the allowed error)"
        )
    text = f"does not compute {policy}"
    if engine.deviation is not None:
        text += f", {engine.deviation.describe(f' of sample {engine.deviation.sample}')}"
    text += next((f", {request.problem}" for request in engine.requests if request.problem), "")
    text += (
        f"; {deviating} of {count} requests differ by more than rounding, the worst by {ranked[0]:.2g} times the allowed error"
    )
    return text if count < 2 else f"{text}, the next {ranked[1]:.2g}"
