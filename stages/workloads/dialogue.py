"""The multi-turn workload: the user states facts, updates some of them in later turns, then asks for some.

A fact is stated as `gate.code=4821` and updated as `gate.code->7310`, once at most, so that the answer is unambiguous.
"""

import random
from collections.abc import Callable

from pipeline.core.records import Sample
from stages.workloads.conversation import Message, Slot, compact_json
from stages.workloads.records import question
from stages.workloads.vocabulary import CITIES, DAYS, FIRST_NAMES, ITEMS, digit_pair, words

SUBJECTS = words("gate safe cabin locker garage office cellar attic")
KINDS: dict[str, Callable[[random.Random], str]] = {
    "code": lambda rng: digit_pair(rng) + digit_pair(rng),
    "room": digit_pair,
    "owner": lambda rng: rng.choice(FIRST_NAMES),
    "place": lambda rng: rng.choice(CITIES),
    "day": lambda rng: rng.choice(DAYS),
    "content": lambda rng: rng.choice(ITEMS),
}
ACKNOWLEDGEMENT = "Noted."
UPDATED_SHARE = 0.4


def facts_dialogue(slot: Slot) -> Sample:
    """Generate 4 to 12 facts and updates of some over several turns, then one to three questions; and the last one's answer."""
    rng = slot.rng()
    num_facts = rng.randint(4, 12)
    num_questions = rng.randint(1, 3)
    keys = rng.sample([f"{subject}.{kind}" for subject in SUBJECTS for kind in KINDS], num_facts)

    def value(key: str) -> str:
        return KINDS[key.split(".")[1]](rng)

    facts = {key: value(key) for key in keys}
    statements = [f"{key}={facts[key]}" for key in keys]
    for key in rng.sample(keys, round(UPDATED_SHARE * num_facts)):
        facts[key] = rng.choice([new for new in (value(key) for _ in range(8)) if new != facts[key]])
        # The update stands anywhere after the statement that it replaces.
        stated_at = next(i for i, statement in enumerate(statements) if statement.startswith(f"{key}="))
        statements.insert(rng.randint(stated_at + 1, len(statements)), f"{key}->{facts[key]}")
    messages: list[Message] = []
    while statements:
        turn, statements = statements[:3], statements[3:]
        messages += [("user", "Remember:\n" + "\n".join(turn)), ("assistant", ACKNOWLEDGEMENT)]
    for key in rng.sample(keys, num_questions):
        messages += [("user", question(key)), ("assistant", compact_json({key: facts[key]}))]
    *asked, (_, reference) = messages
    return Sample(slot.id, slot.workload, reference, messages=tuple(asked), check="json")
