"""Generates seeded text for evaluation and calibration, with the standard library alone.

Other stages call `generate`. The name of the split is part of every sample's seed, so that an evaluation never repeats
the samples of calibration, or of the tiny model's training, whatever the integer seeds are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pipeline.core.records import Sample
from stages.workloads.copying import text_to_copy
from stages.workloads.dialogue import facts_dialogue
from stages.workloads.documentation import Split, excerpt
from stages.workloads.pages import DIFFICULTIES, QUESTIONS, make_page
from stages.workloads.prose import opening_and_continuation
from stages.workloads.records import retrieval
from stages.workloads.tools import TOOLS, tool_call


@dataclass(frozen=True)
class Slot:
    """Which sample of which sequence is generated."""

    split: Split
    workload: str
    seed: int
    index: int

    @property
    def id(self) -> str:
        return f"{self.workload}-{self.index:04d}"

    def rng(self, name: str = "") -> random.Random:
        """Return the generator of this sample, or of what all samples of this index share under `name`.

        Its seed is a text, which keeps splits, workloads and samples apart.
        """
        return random.Random(f"{self.split}:{name or self.workload}:{self.seed}:{self.index}")


def _prose(slot: Slot) -> Sample:
    prompt, reference = opening_and_continuation(slot.rng())
    return Sample(slot.id, slot.workload, reference, prompt=prompt, check="none")


def _retrieval(slot: Slot) -> Sample:
    prompt, reference, depth = retrieval(slot.rng(), slot.index)
    return Sample(slot.id, slot.workload, reference, messages=(("user", prompt),), check="json", depth=depth)


def _tool_call(slot: Slot) -> Sample:
    names, messages, reference = tool_call(slot.rng())
    tools = tuple((name, TOOLS[name][0]) for name in names)
    return Sample(slot.id, slot.workload, reference, messages=messages, check="tool_call", tools=tools)


def _copy(slot: Slot) -> Sample:
    text = text_to_copy(slot.rng())
    return Sample(slot.id, slot.workload, text, messages=(("user", f"Copy:\n{text}"),), check="exact")


def _multi_turn(slot: Slot) -> Sample:
    messages, reference = facts_dialogue(slot.rng())
    return Sample(slot.id, slot.workload, reference, messages=messages, check="json")


def _documentation(slot: Slot) -> Sample:
    prompt, reference = excerpt(slot.split, slot.seed, slot.index)
    return Sample(slot.id, slot.workload, reference, prompt=prompt, check="none")


def _about_a_page(slot: Slot) -> Sample:
    difficulty = DIFFICULTIES[slot.index % len(DIFFICULTIES)]
    page = make_page(slot.rng("page"), difficulty, slot.split)
    question = QUESTIONS[slot.workload](page, slot.rng(), slot.index // len(DIFFICULTIES) % 3)
    return Sample(
        id=slot.id,
        workload=slot.workload,
        reference=question.reference,
        messages=tuple(question.messages),
        check="mention",
        document=f"page-{slot.index:04d}",
        depth=question.depth,
        mentions=question.mentions,
        distractors=question.distractors,
        difficulty=difficulty,
    )


WORKLOADS: dict[str, Callable[[Slot], Sample]] = {
    "prose": _prose,
    "retrieval": _retrieval,
    "tool_call": _tool_call,
    "copy": _copy,
    "multi_turn": _multi_turn,
    "documentation": _documentation,
    **dict.fromkeys(QUESTIONS, _about_a_page),
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
