"""The copy workload: the user gives a piece of code-like or list-like text, and the answer is the same text."""

import random

from pipeline.core.records import Sample
from stages.workloads.conversation import Slot
from stages.workloads.vocabulary import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES, digit_pair

BRACKETS = {"(": ")", "[": "]", "{": "}"}
OPERATORS = ("=", "+", ",", ";", "if", "for")
WORDS = FIRST_NAMES + LAST_NAMES + CITIES + ITEMS
MAX_NESTING = 6


def code_like(rng: random.Random, length: int) -> str:
    """Generate about `length` symbols with balanced brackets."""
    symbols: list[str] = []
    open_brackets: list[str] = []
    for _ in range(length):
        draw = rng.random()
        if draw < 0.2 and len(open_brackets) < MAX_NESTING:
            open_brackets.append(rng.choice(list(BRACKETS)))
            symbols.append(open_brackets[-1])
        elif draw < 0.4 and open_brackets:
            symbols.append(BRACKETS[open_brackets.pop()])
        elif draw < 0.65:
            symbols.append(digit_pair(rng))
        elif draw < 0.85:
            symbols.append(rng.choice(ITEMS))
        else:
            symbols.append(rng.choice(OPERATORS))
    symbols += [BRACKETS[bracket] for bracket in reversed(open_brackets)]
    return " ".join(symbols)


def word_list(rng: random.Random, length: int) -> str:
    """Generate `length` words and numbers in random order."""
    return " ".join(rng.choice(WORDS) if rng.random() < 0.6 else digit_pair(rng) for _ in range(length))


def text_to_copy(slot: Slot) -> Sample:
    """Ask for a copy of 16 to 64 symbols or words."""
    rng = slot.rng()
    length = rng.randint(16, 64)
    text = rng.choice((code_like, word_list))(rng, length)
    return Sample(slot.id, slot.workload, text, messages=(("user", f"Copy:\n{text}"),))
