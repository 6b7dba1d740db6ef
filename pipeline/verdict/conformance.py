"""The record of how an engine compares with its reference engine: the oracle under the same policy, weights and scales.

The unit is a *rounding*: the change of the reference engine's own figures when the output of every layer is off by a few units
in the last place of the engine's type, measured on the same tokens. An engine that computes its policy is about one rounding
from its reference engine; real faults are thousands.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pipeline.verdict.record import Number, Record, or_infinite

ALLOWED = 64.0
"""Most roundings that the logits of a request may be off, 4,096 times the KL of one.
Sound engines show 0.1 to 7, and INT4 in the graphs' functions, whose sums are sixteen times as large as what they sum, above
20."""

MEASURED_ALLOWED = 4.0
"""The same if a rounding is not assumed but measured, as the 16-bit engine's distance from its own reference engine: one there
may be four in a candidate, 16 times the KL. The 16-bit engine itself may be off by as many assumed ones."""

LAYER_ALLOWED = 2.0
"""How many times as far off as the 16-bit engine's a layer's stored vectors may be, where a rounding is measured."""

STORED_ALLOWED = 4.0
"""How many times the errors of stored vectors may be those of a rounding."""

SCALE_STEP = 2.0**-10
"""The most by which the last place of a float16 scale moves a stored vector, relative to its length: it may always round."""

E4M3_SCALE_STEP = 2.0**-6
"""The same of an E4M3 scale, whose neighbour is an eighth away: as far as a 4-bit block moves that is most of a vector."""

MEAN_STEP = 2.0**-13
"""The same for the mean over all stored vectors, few of whose scales lie between two numbers."""

LEAST_KL = 1e-13
"""KL below which two float32 distributions are the same, in nats."""


class Distance(Record):
    """How far one request is from the reference engine. A number that is not finite is null."""

    kl_mean: Number
    """KL(reference engine || engine) over the request's decoded tokens, nats."""
    kl_max: Number
    stored_error: Number
    """How much farther the worst stored vector is from the computed one than its nearest codes, relative to its length. 0 where
    the engine does not show what it stores."""
    stored_mean: Number = 0.0
    """The same, averaged over all stored vectors."""
    stored_by_layer: tuple[float, ...] = ()
    """The same, averaged over the vectors of each layer, where a rounding is measured: of the candidate, and as what a rounding
    costs of the 16-bit engine. A sound quantizer of the same computed keys adds no more than these are off."""


class ComparedRequest(Record):
    """One request on an engine and on its reference engine, on the same forced tokens."""

    sample: str
    prompt_tokens: int
    decoded_tokens: int
    engine: Distance
    rounding: Distance
    """The reference engine from itself with layers that are a rounding off."""
    problem: str = ""
    """What the engine shows of its cache and cannot be the policy's: a width, a length."""
    scale_step: float = SCALE_STEP
    """How far the last place of a scale of the policy may move a stored vector."""

    @property
    def roundings(self) -> float:
        """How many roundings the logits are off, by their mean KL or their largest; infinite where one is not finite."""
        pairs = ((self.engine.kl_mean, self.rounding.kl_mean), (self.engine.kl_max, self.rounding.kl_max))
        return max(math.inf if kl is None or unit is None else math.sqrt(kl / (unit + LEAST_KL)) for kl, unit in pairs)

    def times_allowed(self, limit: float) -> float:
        """Return how many times as far off as `limit` roundings allow the request is, by its worst figure."""
        stored = (
            _times(self.engine.stored_error, self.rounding.stored_error, self.scale_step),
            _times(self.engine.stored_mean, self.rounding.stored_mean, MEAN_STEP),
        )
        return math.inf if self.problem else max(self.roundings / limit, *stored, *self.layers_times_allowed)

    @property
    def layers_times_allowed(self) -> list[float]:
        """How many times what is allowed the stored vectors of each layer are off; empty where no rounding is measured."""
        pairs = zip(self.engine.stored_by_layer, self.rounding.stored_by_layer, strict=False)
        return [error / allowed_in_layer(rounding) for error, rounding in pairs]


def allowed_in_layer(rounding: float) -> float:
    """Return how far a layer's stored vectors may be off, where those of the 16-bit engine are `rounding` off."""
    return LAYER_ALLOWED * rounding + MEAN_STEP


def _times(error: Number, rounding: Number, step: float) -> float:
    return math.inf if error is None or rounding is None else error / (STORED_ALLOWED * max(rounding, 0.0) + step)


class Deviation(Record):
    """The first place at which an engine deviates from its reference engine."""

    sample: str
    position: int
    """In the sequence, from 0."""
    page_offset: int
    """The position within its page."""
    batch_row: int | None
    """Row of the decode step that computed it; null for a token of the prompt."""
    batch_size: int | None
    """Sequences of that step."""
    act: Literal["stored", "read", "computed"]
    """stored: what was written there is not what the policy writes. read: the step that decoded it read its cache wrong.
    computed: the logits differ, and the engine does not show what it stores."""
    layer: int | None
    """For what was read wrong, the last layer that may have: the first wrong codes of that token are in the layer above."""
    side: str | None
    head: int | None

    def __str__(self) -> str:
        return self.told(f" of sample {self.sample}")

    def told(self, of_whom: str = "") -> str:
        """Return the place in words."""
        where = f"position {self.position} (page offset {self.page_offset}"
        if self.batch_row is not None:
            where += f", row {self.batch_row} of a batch of {self.batch_size}"
        where += f"){of_whom}"
        if self.layer is not None:
            head = "" if self.head is None else f" head {self.head}"
            upto = "up to " if self.act == "read" and self.layer else ""
            where += f", {upto}layer {self.layer}{head}{'' if self.side is None else f' {self.side}s'}"
        return f"first {self.act} wrong at {where}"


class Explanation(Record):
    """A near relative of the policy, under which the oracle is much closer to an engine than its reference engine is."""

    what: str
    """What the engine seems to do, as a clause."""
    kl: float
    """Mean KL(relative || engine) of the request, nats."""

    def __str__(self) -> str:
        return f"{self.what} (KL {self.kl:.1e} from an oracle that does so)"


class EngineConformance(Record):
    """An engine against its reference engine."""

    policy: str
    requests: list[ComparedRequest]
    deviation: Deviation | None = None
    """Of the worst request, if it is farther off than rounding allows."""
    kl: Number = None
    """Mean KL(reference engine || engine) of that request, each over its own cache; null if no request deviates."""
    twin_kl: Number = None
    """Mean KL(FP16 baseline || reference engine) of that request: the cost of the policy itself; null for the baseline."""
    explanation: Explanation | None = None
    """What the engine seems to compute instead; null where nothing that was tried fits."""
    limit: Number = None
    """Roundings that were allowed, where the rounding is a measured one; null by the rule of assumed ones."""

    def ranked(self, limit: float) -> list[float]:
        """Return how many times as far off as `limit` roundings allow each request is, the worst first."""
        return sorted((request.times_allowed(limit) for request in self.requests), reverse=True)


class Conformance(Record):
    """Both engines against their reference engines."""

    compute_dtype: str | None
    """Type of the engines' activations, whose last places a rounding is made of; null for engines whose arithmetic differs from
    the oracle's by design, which are described and not judged."""
    baseline: EngineConformance
    candidate: EngineConformance


def allowed(baseline: Sequence[ComparedRequest]) -> float:
    """Return how many roundings a candidate may be off: what the FP16 engine shows as well is no fault of a policy.

    A baseline that is off by more than ALLOWED fails itself.
    """
    worst = max((request.roundings for request in baseline), default=1.0)
    return ALLOWED * min(max(1.0, worst), ALLOWED)


def limits(record: Conformance) -> dict[str, float]:
    """Return how many roundings each engine may be off."""
    usual = {"baseline": ALLOWED, "candidate": allowed(record.baseline.requests)}
    engines = {"baseline": record.baseline, "candidate": record.candidate}
    return {name: usual[name] if engine.limit is None else engine.limit for name, engine in engines.items()}


def bounded(count: int, fault: str) -> str:
    """Say how many requests may still have a fault that none of `count` compared ones has: the rule of three, exactly."""
    return f"so that at most {100 * (1 - 0.05 ** (1 / count)):.2g} % of requests {fault} (95 %)"


def describe(engine: EngineConformance, limit: float, *, judged: bool) -> str:
    """Say in a line whether an engine computes its policy, and where it does not."""
    ranked = engine.ranked(limit)
    if not ranked:
        return "no request was compared with the oracle (workloads.conformance_samples=0), so that nothing passes"
    count = len(ranked)
    largest = max(or_infinite(request.engine.kl_max) for request in engine.requests)
    if not judged:
        mean = sum(or_infinite(request.engine.kl_mean) for request in engine.requests) / count
        return f"{engine.policy} in an arithmetic of its own: KL {mean:.1e} from the oracle's, at most {largest:.1e}"
    deviating = sum(times > 1 for times in ranked)
    if not deviating:
        return (
            f"computes {engine.policy} as the reference engine does: none of {count} requests differs by more than rounding "
            f"(KL at most {largest:.1e}, {ranked[0]:.2g} of what is allowed), {bounded(count, 'deviate')}"
        )
    cost = "" if engine.twin_kl is None else f", which is {engine.twin_kl:.1e} from FP16"
    kl = "not finite" if engine.kl is None else f"{engine.kl:.1e}"
    place = "" if engine.deviation is None else f", {engine.deviation}"
    problem = next((f", {request.problem}" for request in engine.requests if request.problem), "")
    second = "" if count < 2 else f", the next {ranked[1]:.2g}"
    fits = "" if engine.explanation is None else f": it is as if {engine.explanation}"
    return (
        f"does not compute {engine.policy} (KL {kl} from the reference engine{cost}){fits}{place}{problem}; {deviating} of "
        f"{count} requests differ by more than rounding, the worst by {ranked[0]:.2g} times what is allowed{second}"
    )
