"""Documents of given lengths, and seven questions about each document, which share its tokens.

A document is prose from Python's documentation or from the user's texts, with a list of records in each third: codes, homes,
and wares as JSON. Documents of all lengths have the same number of records, so only the distances grow. Every asked code has
more than 20 similar codes. Answers repeat sentences or records of the conversation, as in `stages.workloads.documents`, so that
small models can answer. Only the probability of the values counts (`Sample.results`).
"""

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from stages.core.records import Sample
from stages.workloads import documentation
from stages.workloads.config import LONG
from stages.workloads.conversation import Message, Slot, Split, compact_json, words
from stages.workloads.documents import PLACES, VEHICLES, WARES, Fact, draw_facts

KEYS = [*PLACES, *VEHICLES, *words("farm shop hotel bank school church museum station bridge garden")]
"""Words with a code. A model of 135M parameters confuses keys of two words, such as "red gate" and "blue gate"."""
CODES, OTHERS = 24, 6
"""Number of codes in a document; number of homes, and of wares. They are spread evenly over the thirds of a document.

Each third has one list, because a model of 135M parameters finds few records that stand alone between prose."""


def document_slot(length: int, number: int, seed: int, split: Split = "evaluation") -> Slot:
    """Return the slot of a document. The slot's id is the document's id, and its workload names the length."""
    return Slot(split, f"{LONG}{length}", seed, number)


class _Records(NamedTuple):
    """The records of a document, and a code that a later message states."""

    codes: list[Fact]
    stated: Fact
    homes: list[Fact]
    wares: list[str]
    thirds: list[list[str]]
    """Lines of codes, homes and wares, by third of the document."""


def _records(rng: random.Random) -> _Records:
    keys = rng.sample(KEYS, CODES + 1)
    numbers = rng.sample(range(1000, 10_000), CODES + 1)
    *codes, stated = (Fact("code", key, (str(number),)) for key, number in zip(keys, numbers, strict=True))
    homes = draw_facts(rng, "home", OTHERS)
    wares = [
        compact_json({"ware": ware, "euros": rng.randrange(100, 1000), "kilos": rng.randrange(10, 100)})
        for ware in rng.sample(WARES, OTHERS)
    ]
    thirds = [[*(fact.sentence for fact in (*codes[i::3], *homes[i::3])), *wares[i::3]] for i in range(3)]
    for third in thirds:
        rng.shuffle(third)
    return _Records(codes, stated, homes, wares, thirds)


def _prose(rng: random.Random, split: Split, count: int, texts: Sequence[str] | None) -> list[str]:
    """Return `count` words, each followed by its white space. See `make_questions` for `texts`."""
    if texts is None:
        pages = [" ".join(page) for page in documentation.pages(split)]
        rng.shuffle(pages)
        texts, first = [f"{word} " for word in " ".join(pages).split()], 0
    else:
        first = rng.randrange(len(texts))
    return [texts[(first + number) % len(texts)] for number in range(count)]


def make_questions(document: Slot, prose_words: int, texts: Sequence[str] | None = None) -> list[Sample]:
    """Return the questions about a document that has `prose_words` words of prose in addition to its records.

    `texts`: words with their white space, quoted cyclically from a random position on; None for Python's documentation.
    """
    rng = document.rng()
    codes, stated, homes, wares, thirds = _records(rng)
    prose = _prose(rng, document.split, prose_words, texts)
    text = _spread_prose(["\n".join(third) for third in thirds], prose)

    early, middle, late = (codes[i::3] for i in range(3))
    shared = [*early[0].turns, *homes[1].turns, ("user", _ware_question(wares[1])), ("assistant", wares[1])]
    shared[0] = ("user", f"{text}\n\n{early[0].question}")
    instruction = f"Instruction: first name the home of {homes[0].key}, then give the code of the {late[1].key}."
    summary = f"Summarize the codes of the {early[1].key} and the {middle[1].key}, and the home of {homes[2].key}."
    remember: list[Message] = [
        ("user", f"Please remember this as well.\n{stated.sentence}"),
        ("assistant", "I will remember it."),
        *middle[2].turns,
    ]

    def mention(kind: str, question: str, facts: Sequence[Fact], history: Sequence[Message] = ()) -> Sample:
        """Return a sample whose answer must mention the values of all facts."""
        values = tuple(fact.values[0] for fact in facts)
        reference = " ".join(fact.sentence for fact in facts)
        return Sample(
            id=f"{document.id}-{kind}",
            workload=document.workload,
            reference=reference,
            messages=(*shared, *history, ("user", question)),
            check="mention",
            document=document.id,
            mentions=values,
            distractors=tuple(fact.values[0] for fact in (*codes, *homes, stated) if fact not in facts),
            results=_character_ranges(reference, values),
        )

    values = [str(value) for value in list(json.loads(wares[2]).values())[1:]]
    return [
        mention("early", early[2].question, [early[2]]),
        mention("middle", middle[0].question, [middle[0]]),
        mention("late", late[0].question, [late[0]]),
        mention("instruction", instruction, [homes[0], late[1]]),
        mention("turn", stated.question, [stated], remember),
        mention("summary", summary, [early[1], middle[1], homes[2]]),
        Sample(
            id=f"{document.id}-json",
            workload=document.workload,
            reference=wares[2],
            messages=(*shared, ("user", _ware_question(wares[2]))),
            check="json",
            document=document.id,
            results=_character_ranges(wares[2], values),
        ),
    ]


def _spread_prose(blocks: Sequence[str], prose: Sequence[str]) -> str:
    """Return a text that has an equal part of the prose before every block of records."""
    ends = [len(prose) * number // len(blocks) for number in range(len(blocks) + 1)]
    parts = [("".join(prose[low:high]).strip(), block) for low, high, block in zip(ends, ends[1:], blocks, strict=False)]
    return "\n\n".join(part for pair in parts for part in pair if part)


def _ware_question(record: str) -> str:
    return f"What is the JSON record of the {json.loads(record)['ware']}?"


def _character_ranges(reference: str, values: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) range of each value in the reference. The values must be in order."""
    places, start = [], 0
    for value in values:
        start = reference.index(value, start)
        places.append((start, start + len(value)))
    return tuple(places)
