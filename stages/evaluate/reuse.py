"""An engine over prefixes that earlier requests left in its cache: it must say what it says without them."""

from collections.abc import Sequence

from pipeline.core.engine import Engine
from pipeline.verdict.coverage import ReusedPrefixes
from pipeline.verdict.record import finite
from stages.evaluate.decoding.free import contradiction
from stages.evaluate.distances.distance import kl_of_rows
from stages.evaluate.inputs.tokens import EncodedSample


def reused_prefixes(engine: Engine, encoded: Sequence[EncodedSample]) -> ReusedPrefixes | None:
    """Force samples after prompts that are prefilled, and after the same prompts taken from the cache.

    Args:
        engine: The engine. No sequence is left in it.
        encoded: The samples in tokens.

    Returns:
        How they differ; None for an engine that reuses no prefixes.
    """
    if not engine.can(Engine.forced_reusing) or not encoded:
        return None
    requests = [([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1) for item in encoded]
    alone, reused = engine.forced_together(requests), engine.forced_reusing(requests)
    contradictions, largest = [], 0.0
    for item, exact, again in zip(encoded, alone, reused, strict=True):
        largest = max(largest, *(kl_of_rows(row, other[None])[0] for row, other in zip(exact, again, strict=True)))
        chosen = again.argmax(axis=1).tolist()
        found = contradiction(engine, exact, chosen)
        if found is not None:
            first, gap = found
            contradictions.append(
                f"sample {item.sample.id}: over a reused prefix, token {first} is {chosen[first]}, which is {gap:.2g} less "
                "likely (logits) without it"
            )
    return ReusedPrefixes(
        samples=len(encoded),
        tokens=sum(map(len, alone)),
        kl_max=finite(largest),
        contradictions=contradictions,
    )
