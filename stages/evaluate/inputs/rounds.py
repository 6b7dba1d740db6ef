"""Divides the samples of an evaluation into rounds, after each of which the gates may have seen enough."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from pipeline.core.records import Sample
from pipeline.verdict.report import LEAST_STEP


def assign_rounds(samples: Sequence[Sample], shares: Sequence[float]) -> list[list[Sample]]:
    """Divide samples into rounds that look alike.

    Every workload and difficulty is divided as the shares say, as near as whole documents allow. The order of the samples
    decides nothing but their order within a round: a file sorted by difficulty gives the same rounds.

    Args:
        samples: The samples.
        shares: The share of the samples that each round ends at, ascending to 1.

    Returns:
        The samples of each round, in their order. A round of less than LEAST_STEP of all samples, as few and long documents
        make it, is run with the one after it, the last with the one before.
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
    sizes = Counter(rounds[sample.cluster] for sample in samples)
    return [[s for s in samples if rounds[s.cluster] in numbers] for numbers in _merged(sizes, len(shares), len(samples))]


def _merged(sizes: Counter[int], count: int, total: int) -> list[set[int]]:
    """Return the numbers of the rounds that are run together, none of them with less than LEAST_STEP of all samples."""
    groups: list[set[int]] = [set()]
    for number in range(count):
        if _size(groups[-1], sizes) >= LEAST_STEP * total:
            groups.append(set())
        groups[-1].add(number)
    if len(groups) > 1 and _size(groups[-1], sizes) < LEAST_STEP * total:
        last = groups.pop()
        groups[-1] |= last
    return groups


def _size(numbers: set[int], sizes: Counter[int]) -> int:
    return sum(sizes[number] for number in numbers)


def planned_shares(numbers: Sequence[int]) -> list[float]:
    """Return the share of all samples that each round ends at, which is what the looks of the gates go by.

    Args:
        numbers: The round of each sample, from 1.
    """
    sizes = Counter(numbers)
    return [ended / len(numbers) for ended in accumulate(sizes[number] for number in sorted(sizes))]
