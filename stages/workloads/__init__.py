"""Generates seeded text for evaluation, calibration and training, with the standard library alone.

Other stages call `generate`. The name of the split is part of every sample's seed, so that an evaluation never repeats
the samples of training or calibration, whatever the integer seeds are.
"""

import random
from collections.abc import Callable
from typing import Literal

from pipeline.core.records import Sample
from stages.workloads.conversation import split_last_answer
from stages.workloads.copying import copy_request
from stages.workloads.dialogue import facts_dialogue
from stages.workloads.prose import opening_and_continuation
from stages.workloads.records import retrieval
from stages.workloads.tools import TOOLS, offered_tools, tool_call

Split = Literal["train", "calibration", "evaluation"]


def rng_for(split: Split, name: str, seed: int, index: int) -> random.Random:
    """Return the random generator of one sample; its string seed keeps splits, workloads and samples apart."""
    return random.Random(f"{split}:{name}:{seed}:{index}")


def _prose(rng: random.Random, sample_id: str, _index: int) -> Sample:
    prompt, reference = opening_and_continuation(rng)
    return Sample(id=sample_id, workload="prose", prompt=prompt, reference=reference, check="none")


def _retrieval(rng: random.Random, sample_id: str, index: int) -> Sample:
    conversation, depth = retrieval(rng, index)
    messages, reference = split_last_answer(conversation)
    return Sample(id=sample_id, workload="retrieval", messages=messages, reference=reference, check="json", depth=depth)


def _tool_call(rng: random.Random, sample_id: str, _index: int) -> Sample:
    names = offered_tools(rng)
    messages, reference = split_last_answer(tool_call(rng, names))
    tools = tuple((name, TOOLS[name][0]) for name in names)
    return Sample(id=sample_id, workload="tool_call", messages=messages, reference=reference, check="tool_call", tools=tools)


def _copy(rng: random.Random, sample_id: str, _index: int) -> Sample:
    messages, reference = split_last_answer(copy_request(rng, rng.randint(16, 64)))
    return Sample(id=sample_id, workload="copy", messages=messages, reference=reference, check="exact")


def _multi_turn(rng: random.Random, sample_id: str, _index: int) -> Sample:
    num_facts = rng.randint(4, 12)
    messages, reference = split_last_answer(facts_dialogue(rng, num_facts, rng.randint(1, 3)))
    return Sample(id=sample_id, workload="multi_turn", messages=messages, reference=reference, check="json")


WORKLOADS: dict[str, Callable[[random.Random, str, int], Sample]] = {
    "prose": _prose,
    "retrieval": _retrieval,
    "tool_call": _tool_call,
    "copy": _copy,
    "multi_turn": _multi_turn,
}


def generate(name: str, count: int, seed: int, split: Split = "evaluation") -> list[Sample]:
    """Generate samples of one workload. A larger `count` extends the same sequence.

    Args:
        name: A key of WORKLOADS.
        count: Number of samples.
        seed: Seed of the samples.
        split: Other splits have other samples.

    Returns:
        The samples, with ids from `retrieval-0000` on.

    Raises:
        ValueError: There is no such workload.

    Example:
        >>> [sample.id for sample in generate("copy", 2, seed=0)]
        ['copy-0000', 'copy-0001']
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}; or give a JSONL file's path")
    return [WORKLOADS[name](rng_for(split, name, seed, i), f"{name}-{i:04d}", i) for i in range(count)]
