"""Explains an engine that misses its policy, by the most similar variant (relative) of the policy.

Legend: R = decoded tokens of a request, V = vocab_size.
"""

from collections.abc import Callable

import torch

from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.relatives import relatives
from stages.engines.reference.replay import Replay
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.decoding.batches import Logits
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.conformance import Explanation
from stages.verdict.record import finite

CLOSER = 4.0
"""Minimum ratio of the reference engine's distance to the relative's distance, for the relative to explain an engine."""

FAR = 1e6
"""Error assigned to stored vectors that are not finite."""


def explained(reference: ReferenceEngine, item: EncodedSample, logits_RV: Logits, twin_kl: float | None) -> Explanation | None:
    """Return the relative closest to the engine; None unless it is CLOSER than the reference engine."""
    found = []
    for what, relative in relatives(reference.engine):
        kl = finite(_kl_of_relative(relative, item, logits_RV))
        if kl is not None and (twin_kl is None or kl * CLOSER < twin_kl):
            found.append(Explanation(what=what, kl=kl))
    return min(found, key=lambda explanation: explanation.kl, default=None)


def explained_by_codes(
    reference: ReferenceEngine, item: EncodedSample, logits_RV: Logits, replayed: Callable[[TorchEngine], Replay]
) -> Explanation | None:
    """Return the relative whose stored vectors match the engine's; None without a match.

    Use it if 16-bit logits are too imprecise for `explained`.

    Args:
        reference: The reference engine.
        item: The request.
        logits_RV: The engine's logits.
        replayed: Replays the request on a given `TorchEngine` over the engine's codes.
    """
    found = []
    least = _stored(replayed(reference.engine)) / CLOSER
    for what, relative in relatives(reference.engine):
        if relative.policy != reference.engine.policy:
            continue  # the codes may have a different width
        stored = _stored(replayed(relative))
        if stored < least:
            found.append((stored, what, relative))
    if not found:
        return None
    _, what, relative = min(found, key=lambda part: part[0])
    kl = finite(_kl_of_relative(relative, item, logits_RV))
    return None if kl is None else Explanation(what=what, kl=kl)


def _kl_of_relative(relative: TorchEngine, item: EncodedSample, logits_RV: Logits) -> float:
    rows = relative.forced([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1)
    return float(kl_of_logits(rows, logits_RV).mean())


def _stored(replay: Replay) -> float:
    """Return the absolute mean error of the engine's stored vectors in a replay."""
    errors = [copy.engine.flatten() for layer in replay.errors for copy in layer.values()]
    return abs(float(torch.cat(errors).mean().nan_to_num(nan=FAR, posinf=FAR)))
