"""Samples that an engine repeats in another batch composition (A/A noise), and samples of the must-fail control."""

from collections import Counter
from collections.abc import Sequence

from stages.evaluate.inputs.tokens import EncodedSample
from stages.workloads.config import CONTROL_SAMPLES, WorkloadsConfig


def answered(encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return the samples whose answers are judged, or all samples if no answers are judged.

    Samples of prose are longer and would show nothing more.
    """
    return [item for item in encoded if item.judged] or list(encoded)


def control_samples(encoded: Sequence[EncodedSample], least: int, count: int = CONTROL_SAMPLES) -> list[EncodedSample]:
    """Return the samples of the must-fail control: the shortest prompts with at least `least` tokens, or else the longest.

    A short prompt may consist of sink and recent tokens only, which are kept exact, and would then use no scale.
    """
    by_length = sorted(answered(encoded), key=lambda item: len(item.prompt))
    enough = [item for item in by_length if len(item.prompt) >= least]
    return enough[:count] if len(enough) >= count else by_length[-count:][::-1]


def repeated_samples(encoded: Sequence[EncodedSample], config: WorkloadsConfig) -> list[EncodedSample]:
    """Return the samples that an engine repeats: the first judged samples of every workload, and the longest judged sample."""
    if not config.noise_samples:
        return []
    able = answered(encoded)
    seen = Counter[str]()
    chosen = {max(range(len(able)), key=lambda i: len(able[i].prompt) + len(able[i].reference))}
    for i, item in enumerate(able):
        if seen[item.sample.workload] < config.noise_samples:
            chosen.add(i)
        seen[item.sample.workload] += 1
    return [able[i] for i in sorted(chosen)]
