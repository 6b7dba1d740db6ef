"""Generates seeded text for evaluation and calibration, using only the standard library.

Other stages call `generate`. The name of the split is part of every sample's seed, so that an evaluation never repeats
samples of the calibration or of the tiny model's training, for any integer seed.
"""

from collections.abc import Callable
from functools import lru_cache

from stages.core.records import Sample
from stages.workloads.conversation import Slot, Split
from stages.workloads.documentation import excerpt
from stages.workloads.documents import QUESTIONS
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
    """Generate `count` samples of a workload; a larger `count` extends them. Raises UserError if there are too few pages."""
    return [_sample(Slot(split, name, seed, i)) for i in range(count)]


@lru_cache(maxsize=4096)
def _sample(slot: Slot) -> Sample:
    """Return a sample. The cache helps commands that need the same samples to encode, to replay and to print them."""
    return WORKLOADS[slot.workload](slot)
