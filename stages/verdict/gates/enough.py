"""Tells before any work whether the questions are too few for a PASS, even if a candidate changes nothing."""

from collections.abc import Sequence

from stages.core.records import Sample
from stages.verdict.gates.distances import NONE_OF, shows_none_ruined
from stages.verdict.thresholds import Gates


def too_few(samples: Sequence[Sample], gates: Gates) -> str | None:
    """Return why no candidate can PASS on these samples; None if they suffice.

    Example: `cannot pass: 20 of 60 questions; ask 60, better 300`.
    """
    documents: dict[str, set[str]] = {}
    for sample in samples:
        if sample.check != "none":
            documents.setdefault(sample.workload, set()).add(sample.cluster)
    if not documents:  # without answers, distances decide over all texts together
        documents["all"] = {sample.cluster for sample in samples}
    missing = []
    if not shows_none_ruined(len({sample.cluster for sample in samples}), len(samples), gates):
        least = next(count for count in range(1, NONE_OF + 1) if shows_none_ruined(count, count, gates))
        missing.append(f"{len(samples)} of {least} questions")
    missing += [
        f"{len(found)} of {gates.min_samples} documents of {name}"
        for name, found in sorted(documents.items())
        if len(found) < gates.min_samples
    ]
    return f"cannot pass: {', '.join(missing)}; ask {NONE_OF}, better {5 * NONE_OF}" if missing else None
