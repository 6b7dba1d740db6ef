"""Divides the samples of an evaluation into rounds, after each of which the gates may have seen enough."""

import hashlib
from collections import Counter
from collections.abc import Sequence

from pipeline.core.records import Sample


def assign_rounds(samples: Sequence[Sample], shares: Sequence[float]) -> list[list[Sample]]:
    """Divide samples into rounds that look alike.

    Every workload and difficulty is divided as the shares say, as near as whole documents allow. The order of the samples
    decides nothing but their order within a round: a file sorted by difficulty gives the same rounds.

    Args:
        samples: The samples.
        shares: The share of the samples that each round ends at, ascending to 1.

    Returns:
        The samples of each round, in their order. Rounds that would be empty are left out.
    """
    documents: dict[str, Counter[tuple[str, str]]] = {}
    for sample in samples:
        documents.setdefault(sample.cluster, Counter())[sample.workload, sample.difficulty] += 1
    totals = sum(documents.values(), Counter[tuple[str, str]]())
    widths = [share - before for before, share in zip([0.0, *shares], shares, strict=False)]
    missing = [{stratum: width * count for stratum, count in totals.items()} for width in widths]
    rounds: dict[str, int] = {}
    # Large documents first: small ones even out what they leave. The digest shuffles those of one size.
    order = sorted(documents, key=lambda name: (-documents[name].total(), hashlib.sha256(name.encode()).hexdigest()))
    for name in order:
        document = documents[name]

        def lacking(number: int, document: Counter[tuple[str, str]] = document) -> float:
            return sum(count * missing[number][stratum] / totals[stratum] for stratum, count in document.items())

        chosen = max(range(len(shares)), key=lambda number: (lacking(number), -number))
        rounds[name] = chosen
        for stratum, count in document.items():
            missing[chosen][stratum] -= count
    divided = [[sample for sample in samples if rounds[sample.cluster] == number] for number in range(len(shares))]
    return [round_ for round_ in divided if round_]
