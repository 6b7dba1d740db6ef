"""An engine's twin: the oracle under the same policy, scales and weights, and what a rounding costs there.

A number that lies between two codes may round to the other one after any rounding of the arithmetic before it, and a few such
flips move the logits of a coarse cache more than some faults do. So the twin answers twice: as it is, and with activations that
are a rounding off. The distance of the two is what a sound engine may differ by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.engines.base import Logits
from stages.engines.oracle.engine import OracleEngine

ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""By how much the output of a layer may be off in each type, relative to its root mean square: four units in the last place."""


@dataclass(frozen=True)
class Twin:
    """An oracle, and the type of the engine that it is the twin of."""

    engine: OracleEngine
    compute_dtype: str | None
    """None: the engine's arithmetic differs by design."""

    @property
    def rounding(self) -> float:
        return ROUNDING[self.compute_dtype or "float32"]


OpenTwin = Callable[[], Twin]


def model_tokens(twin: Twin) -> int | None:
    """Return the positions that a twin's model was made for; None where it does not say."""
    positions: int | None = getattr(twin.engine.model.config, "max_position_embeddings", None)
    return positions


def expected_rows(twin: Twin, tokens: Sequence[int], first: int, chunk: int) -> Logits:
    """Return the logits of forced decode of tokens[first:], (len(tokens) - first, V).

    Args:
        twin: The engine's twin.
        tokens: A whole sequence.
        first: The tokens before it were prefilled.
        chunk: Tokens of one prefill run.
    """
    oracle = twin.engine
    configured, oracle.prefill_chunk = oracle.prefill_chunk, chunk
    try:
        return oracle.forced(tokens, first)
    finally:
        oracle.prefill_chunk = configured


def rounded_rows(twin: Twin, tokens: Sequence[int], first: int, chunk: int) -> tuple[Logits, Logits]:
    """Return the logits of `expected_rows`, and the same with activations that are a rounding off."""
    replay = twin.engine.replay(tokens, [first], [], rounding=twin.rounding, prefill_chunk=chunk)
    return replay.logits, replay.disturbed
