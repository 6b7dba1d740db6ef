"""An engine beside itself: some samples again in another batch composition, whose distances are the noise of a comparison."""

from collections.abc import Sequence

from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import Fidelity
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample

LEAST_CONTROL = 8
"""Fewest samples of the must-fail control. The answer of some samples stands in exact tokens: of two one may lose nothing."""


def first_of_each_workload(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of the first `count` samples of every workload."""
    counts: dict[str, int] = {}
    indices = []
    for i, item in enumerate(encoded):
        counts[item.sample.workload] = counts.get(item.sample.workload, 0) + 1
        if counts[item.sample.workload] <= count:
            indices.append(i)
    return indices


def answered(encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return the samples whose answers are judged, all where none is: prose is longer, and shows nothing else."""
    return [item for item in encoded if item.judged] or list(encoded)


def canary_samples(encoded: Sequence[EncodedSample], config: WorkloadsConfig, least: int | None = None) -> list[EncodedSample]:
    """Return the must-fail control's samples: as many as `canary_samples` of each workload, and LEAST_CONTROL at least.

    The shortest prompts of `least` tokens or more; the longest if too few have as many, or if nobody knows how many do.
    A short prompt may consist of exact sink and recent tokens, and then reads no scale.
    """
    count = max(LEAST_CONTROL, len(first_of_each_workload(encoded, config.canary_samples)))
    by_length = sorted(answered(encoded), key=lambda item: len(item.prompt))
    enough = [item for item in by_length if least is not None and len(item.prompt) >= least]
    return enough[:count] if len(enough) >= count else by_length[-count:][::-1]


def repeated_samples(encoded: Sequence[EncodedSample], config: WorkloadsConfig) -> list[EncodedSample]:
    """Return the samples that an engine repeats: the first ones of every workload with answers, and the longest of these."""
    if not config.noise_samples:
        return []
    able = answered(encoded)
    longest = max(range(len(able)), key=lambda i: len(able[i].prompt) + len(able[i].reference))
    return [able[i] for i in sorted({*first_of_each_workload(able, config.noise_samples), longest})]


def noise_floor(again: Sequence[SampleResult]) -> Fidelity | None:
    """Return the A/A noise: what repeated samples gave beside the engine's own distributions; None without samples."""
    return metrics.fidelity(StepStatistics.joined([result.statistics for result in again])) if again else None
