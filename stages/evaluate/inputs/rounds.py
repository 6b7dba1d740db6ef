"""Divides the samples of an evaluation into rounds. The gates may decide after any round and skip the others."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from stages.core.records import Sample

FIRST_ROUND = 15
"""Minimum judged samples per workload in the first round. Fewer samples do not show whether the baseline can answer, and a
PASS needs 15 documents anyway, the default of `gates.min_samples`."""


def assign_rounds(samples: Sequence[Sample], shares: Sequence[float]) -> list[list[Sample]]:
    """Divide samples into rounds of similar composition. `shares`: cumulative share of the samples, by round, ascending to 1.

    Every workload and difficulty is divided in proportion to the shares, as closely as possible without splitting a document.
    The order of the samples affects only their order within a round: a file sorted by difficulty gives the same rounds. The
    first round has FIRST_ROUND judged samples of every workload, or all of a smaller workload. Empty rounds are left out.
    """
    documents: dict[str, Counter[tuple[str, str]]] = {}
    for sample in samples:
        documents.setdefault(sample.cluster, Counter())[sample.workload, sample.difficulty] += 1
    totals = sum(documents.values(), Counter[tuple[str, str]]())
    widths = [share - before for before, share in zip([0.0, *shares], shares, strict=False)]
    missing = [{stratum: width * count for stratum, count in totals.items()} for width in widths]
    rounds: dict[str, int] = {}
    # Assign large documents first, so that small documents even out the rounds. The digest shuffles documents of equal size.
    order = sorted(documents, key=lambda name: (-documents[name].total(), hashlib.sha256(name.encode()).hexdigest()))
    for name in order:
        document = documents[name]

        def lacking(number: int, document: Counter[tuple[str, str]] = document) -> float:
            return sum(count * missing[number][stratum] / totals[stratum] for stratum, count in document.items())

        chosen = max(range(len(shares)), key=lambda number: (lacking(number), -number))
        rounds[name] = chosen
        for stratum, count in document.items():
            missing[chosen][stratum] -= count
    judged: dict[str, list[int]] = {}
    for sample in samples:
        if sample.judged:
            judged.setdefault(sample.workload, []).append(rounds[sample.cluster])
    first = next(number for number in range(len(shares)) if _suffices(number, judged))
    numbers = [max(first, rounds[sample.cluster]) for sample in samples]
    placed = list(zip(samples, numbers, strict=True))
    return [[sample for sample, place in placed if place == number] for number in sorted(set(numbers))]


def _suffices(number: int, judged: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the rounds up to `number` have FIRST_ROUND judged samples of every workload, or all its samples."""
    return all(sum(place <= number for place in places) >= min(FIRST_ROUND, len(places)) for places in judged.values())
