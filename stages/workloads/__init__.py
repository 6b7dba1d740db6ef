"""Generates seeded text for evaluation and calibration, with the standard library alone.

Other stages call `generate`. The name of the split is part of every sample's seed, so that an evaluation never repeats
the samples of calibration, or of the tiny model's training, whatever the integer seeds are.
"""

from collections.abc import Callable
from functools import lru_cache

from pipeline.core.records import Sample
from stages.workloads.conversation import Slot, Split
from stages.workloads.documentation import excerpt
from stages.workloads.pages import QUESTIONS
from stages.workloads.trained import facts_dialogue, opening_and_continuation, retrieval, text_to_copy, tool_call

WORKLOADS: dict[str, Callable[[Slot], Sample]] = {
    "prose": opening_and_continuation,
    "retrieval": retrieval,
    "tool_call": tool_call,
    "copy": text_to_copy,
    "multi_turn": facts_dialogue,
    "documentation": excerpt,
    **QUESTIONS,
}


def generate(name: str, count: int, seed: int, split: Split = "evaluation") -> list[Sample]:
    """Generate samples of one workload. A larger `count` extends the same sequence.

    Returns:
        The samples, with ids from `retrieval-0000` on.

    Raises:
        ValueError: There is no such workload.
        UserError: The documentation has fewer pages than that.

    Example:
        >>> [sample.id for sample in generate("copy", 2, seed=0)]
        ['copy-0000', 'copy-0001']
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}; or give a JSONL file's path")
    return [_sample(Slot(split, name, seed, i)) for i in range(count)]


@lru_cache(maxsize=4096)
def _sample(slot: Slot) -> Sample:
    """Return a sample, which a command asks for several times: to encode, to replay and to show it."""
    return WORKLOADS[slot.workload](slot)
