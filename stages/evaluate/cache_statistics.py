"""Distribution of keys and values by layer, and the signal-to-noise ratio of their quantization."""

from collections.abc import Sequence
from math import log10
from typing import Any

from stages.engines.reference.engine import TorchEngine
from stages.policies.policy import Side
from stages.verdict.report import CacheStatistics

MAX_TOKENS = 512
"""Maximum number of tokens that are measured."""


def cache_statistics(engine: TorchEngine, tokens: Sequence[int]) -> list[CacheStatistics]:
    """Measure the keys and values that a prompt's first tokens have in every layer, in the formats of the engine's policy."""
    measured: list[CacheStatistics] = []

    def visit(layer: int, side: Side, computed: Any, stored: Any) -> None:
        signal, noise = (float(x.double().pow(2).sum()) for x in (computed, stored - computed))
        measured.append(
            CacheStatistics(
                layer=layer,
                side="key" if side.is_key else "value",
                low=float(computed.min()),
                high=float(computed.max()),
                p999=float(computed.abs().flatten().quantile(0.999)),
                snr_db=10 * (log10(signal) - log10(noise)) if signal and noise else None,
            )
        )

    engine.visit_states(tokens[:MAX_TOKENS], visit)
    return measured
