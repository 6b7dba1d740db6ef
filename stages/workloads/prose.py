"""The prose workload: small generated stories in which names, places and things recur."""

import random

from pipeline.core.records import Sample
from stages.workloads.conversation import Slot
from stages.workloads.vocabulary import CITIES, DAYS, FIRST_NAMES, ITEMS, LAST_NAMES, words

VERBS = words("repaired painted sold carried found borrowed cleaned hid")
ADJECTIVES = words("old small heavy red broken quiet bright narrow")
PLACES = words("market harbour station library bakery garden bridge museum")


def story(rng: random.Random) -> str:
    """Generate six to ten sentences about two people, 80 to 150 tokens of the tiny tokenizer."""
    first, friend = rng.sample(FIRST_NAMES, 2)
    last, (home, away) = rng.choice(LAST_NAMES), rng.sample(CITIES, 2)
    (item, other_item), (place, other_place) = rng.sample(ITEMS, 2), rng.sample(PLACES, 2)
    adjective, other_adjective = rng.sample(ADJECTIVES, 2)
    weekday = rng.randrange(7)
    day, next_day = DAYS[weekday], DAYS[(weekday + 1) % 7]
    middle = [
        f"On {day} {first} {rng.choice(VERBS)} the {adjective} {item}.",
        f"The {item} was {adjective} and {first} liked it.",
        f"{first} walked from the {place} to the {other_place} with {friend}.",
        f"Then {friend} asked {first} about the {adjective} {item}.",
        f'"I {rng.choice(VERBS)} the {other_item} on {next_day}," said {friend}.',
        f"The train to {away} was {rng.choice(('late', 'early', 'full', 'empty'))}, so {first} stayed in {home}.",
        f"{friend} came from {away} and wanted to see the {other_place}.",
        f"They paid {rng.randrange(2, 99)} coins for the {other_adjective} {other_item} at the {other_place}.",
        f"After {day} came {next_day}, and the {place} was {rng.choice(('open', 'closed'))} again.",
        f"{first} {last} put the {item} next to the {other_item}.",
    ]
    sentences = [
        f"{first} {last} lived in {home}, near the {place}.",
        *rng.sample(middle, rng.randrange(4, 9)),
        f"In the end {first} {last} went home to {home} with the {adjective} {item}.",
    ]
    return " ".join(sentences)


def opening_and_continuation(slot: Slot) -> Sample:
    """Generate a prompt and its continuation, two stories each, which are 130 to 300 tokens."""
    rng = slot.rng()
    first, second, third, fourth = (story(rng) for _ in range(4))
    return Sample(slot.id, slot.workload, f"{third}\n\n{fourth}", prompt=f"{first}\n\n{second}\n\n", check="none")
