"""The reference engine: a `TorchEngine` with the policy, scales and weights of the engine under test.

A number halfway between two codes may get either code, depending on earlier rounding errors. With a coarse cache, a few flipped
codes change the logits more than some faults do. The reference engine therefore also computes logits with activations that are
disturbed by a rounding error. The distance between the two results is the unit of the allowed distance.
"""

from dataclasses import dataclass, replace

from stages.checkpoints.description import TOKENS
from stages.engines.backend import ROUNDING
from stages.engines.reference.engine import TorchEngine
from stages.verdict.conformance import ALLOWED, MEASURED_ALLOWED, EngineConformance, allowed

MIN_MEASURED = 1 / 16
"""Minimum of a measured rounding as a fraction of the assumed rounding, because a few samples may agree by chance."""


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
        named = [getattr(config, name, None) for name in TOKENS]
        ids = [token for name in named for token in (name if isinstance(name, list) else [name])]
        return [token for token in dict.fromkeys(ids) if isinstance(token, int) and 0 <= token < self.engine.vocab_size]
