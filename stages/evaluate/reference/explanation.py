"""What an engine that misses its policy computes instead: the near relative of the policy that fits it.

Legend: R = decoded tokens of a request, V = vocab_size.
"""

from collections.abc import Callable

import torch

from pipeline.verdict.conformance import Explanation
from pipeline.verdict.record import finite
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.relatives import relatives
from stages.engines.oracle.replay import Replay
from stages.evaluate.decoding.batches import Logits
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.inputs.tokens import EncodedSample
from stages.evaluate.reference.engine import ReferenceEngine

CLOSER = 4.0
"""How many times as close as the reference engine a relative of its policy must be to explain an engine."""

FAR = 1e6
"""The error of stored vectors that are not finite."""


def explained(reference: ReferenceEngine, item: EncodedSample, logits_RV: Logits, twin_kl: float | None) -> Explanation | None:
    """Return the relative of the policy that is closest to an engine; None where none is much closer than the reference."""
    found = []
    for what, relative in relatives(reference.engine):
        kl = finite(_kl_of_relative(relative, item, logits_RV))
        if kl is not None and (twin_kl is None or kl * CLOSER < twin_kl):
            found.append(Explanation(what=what, kl=kl))
    return min(found, key=lambda explanation: explanation.kl, default=None)


def explained_by_codes(
    reference: ReferenceEngine, item: EncodedSample, logits_RV: Logits, replayed: Callable[[OracleEngine], Replay]
) -> Explanation | None:
    """Return the relative that stores what an engine stores, where 16-bit logits cannot tell; None where none does.

    Args:
        reference: The engine's reference.
        item: The request.
        logits_RV: What the engine gave.
        replayed: Replays the request on an oracle over the engine's codes.
    """
    found = []
    least = _stored(replayed(reference.engine)) / CLOSER
    for what, relative in relatives(reference.engine):
        if relative.policy != reference.engine.policy:
            continue  # its codes have another width
        stored = _stored(replayed(relative))
        if stored < least:
            found.append((stored, what, relative))
    if not found:
        return None
    _, what, relative = min(found, key=lambda part: part[0])
    kl = finite(_kl_of_relative(relative, item, logits_RV))
    return None if kl is None else Explanation(what=what, kl=kl)


def _kl_of_relative(relative: OracleEngine, item: EncodedSample, logits_RV: Logits) -> float:
    rows = relative.forced([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1)
    return float(kl_of_logits(rows, logits_RV).mean())


def _stored(replay: Replay) -> float:
    """Return how far what an engine stores is from what an oracle stores of the same numbers, in the mean, either way."""
    errors = [copy.engine.flatten() for layer in replay.errors for copy in layer.values()]
    return abs(float(torch.cat(errors).mean().nan_to_num(nan=FAR, posinf=FAR)))
