"""The reference engine: the oracle under an engine's policy, scales and weights, and what a rounding costs there.

A number that lies between two codes may round to the other one after any rounding of the arithmetic before it, and a few such
flips move the logits of a coarse cache more than some faults do. So the reference engine answers twice: as it is, and with
activations that are a rounding off. A sound engine may differ by the distance of these two answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.artifacts.backend import FLOAT16_WEIGHTS
from pipeline.core.engine import Engine
from pipeline.core.kv import Side
from pipeline.core.records import StoredCopy
from pipeline.verdict.conformance import MEASURED_ALLOWED, EngineConformance, allowed
from stages.engines.oracle.attention import Fed
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.replay import Replay

ROUNDING = {"float32": 2.0**-22, FLOAT16_WEIGHTS: 2.0**-17, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""By how much the output of a layer may be off in each type, relative to its root mean square: four units in the last place.
With weights in float16 the output is twice as far off as an H200 shows: its FP16 cache has the median KL of 2^-18, 4e-8."""


LEAST_MEASURED = 1 / 16
"""A measured rounding is at least this part of the assumed one: a few samples may agree by luck."""


@dataclass(frozen=True)
class ReferenceEngine:
    """An oracle, and the type of the activations of the engine that is compared with it."""

    engine: OracleEngine
    compute_dtype: str | None
    """None: the engine's arithmetic differs by design."""
    measures: bool = False
    """Whether a rounding is measured as the baseline's distance from its own reference engine: its library sums in an order of
    its own, in 16 bits, and four units in the last place of every layer would hide what its cache does wrong."""
    measured: float | None = None
    """That rounding, where it was measured."""

    @property
    def rounding(self) -> float:
        return ROUNDING[self.compute_dtype or "float32"] if self.measured is None else self.measured

    def with_rounding_of(self, baseline: EngineConformance | None) -> "ReferenceEngine":
        """Return the reference engine with the rounding that the baseline shows, if a rounding is measured."""
        if not self.measures or baseline is None or not baseline.requests:
            return self
        worst = max(request.roundings for request in baseline.requests)
        return replace(self, measured=self.rounding * min(1.0, max(worst, LEAST_MEASURED)))

    def run_as(self, engine: Engine) -> "ReferenceEngine":
        """Run prompts as an engine does from now on: in its chunks, and reading what it reads."""
        self.engine.prefill_chunk, self.engine.reads_itself = engine.prefill_chunk, engine.reads_itself
        return self

    @property
    def model_tokens(self) -> int | None:
        """The positions that its model was made for; None where it does not say."""
        positions: int | None = getattr(self.engine.model.config, "max_position_embeddings", None)
        return positions

    def replay(
        self,
        sequences: Sequence[Fed],
        caches: Sequence[Sequence[Mapping[Side, StoredCopy]]] = (),
        oracle: OracleEngine | None = None,
        *,
        disturbed: bool = True,
    ) -> list[Replay]:
        """Replay sequences on the oracle, or on another one; `disturbed` has activations that are a rounding off beside them.

        Arguments: `stages.engines.oracle.engine.OracleEngine.replay`.
        """
        return (oracle or self.engine).replay(sequences, caches, rounding=self.rounding if disturbed else 0.0)

    def limits(self, baseline: EngineConformance | None) -> tuple[float, tuple[float, ...]]:
        """Return how many roundings an engine may be off, and the errors of each layer that its baseline stores.

        What the baseline shows as well is usual for a candidate. Of the baseline itself, `baseline` is None.
        """
        requests = [] if baseline is None else baseline.requests
        stored = [request.engine.stored_by_layer for request in requests if request.engine.stored_by_layer]
        return MEASURED_ALLOWED if self.measures else allowed(requests), tuple(map(max, zip(*stored, strict=True)))
