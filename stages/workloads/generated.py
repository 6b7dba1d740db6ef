"""Generates seeded text for evaluation and calibration, using only the standard library.

Other stages call `generate`. The name of the split is part of every sample's seed, so that an evaluation never repeats
samples of the calibration or of the tiny model's training, for any integer seed. Besides `generate`, this file has the five
workloads that the tiny model was trained on.

**Prose**: short generated stories with recurring names, places and things.
**Retrieval**: many similar records, and a question about one field of a record. Records are written flat, one field per line
(`KT4821.total=93.10`), and the answer is `{"KT4821.total":"93.10"}`. Distractors are hard: ids share prefixes and digit pairs,
and values come from small pools, so that names, dates and amounts repeat between records. Each key occurs once in the records.
**Tool calls**: the system turn declares tools, the user makes a request, and the answer is one JSON call. The request's verb
phrase determines the tool. The request contains the arguments in any order, for example `city=Olten`; the call lists them in
the order of the tool's declaration.
**Copies**: the user gives code-like or list-like text, and the answer is the same text.
**Dialogues**: the user states facts, updates some facts in later turns, then asks for some. A fact is stated as
`gate.code=4821` and updated as `gate.code->7310` at most once, so that the answer is unambiguous.

The word lists are small on purpose: many records look alike, so that a model easily attends to a wrong but similar place, and
then gives a wrong answer.
"""

import random
from collections.abc import Callable
from functools import lru_cache

from stages.core.records import Sample
from stages.workloads.conversation import DAYS, Message, Slot, Split, compact_json, words
from stages.workloads.documentation import excerpt
from stages.workloads.documents import QUESTIONS

FIRST_NAMES = words(
    "Mara Tobin Elsa Oskar Nadia Felix Ruth Ivan Clara Hugo Petra Simon Leila Bruno Alma Viktor "
    "Dora Emil Hanna Jonas Katya Lorenz Mira Nils Olga Pavel Rosa Stefan Tilda Ulrich Vera Walter"
)
LAST_NAMES = words(
    "Voss Keller Brandt Moreau Lindt Okafor Sato Novak Ricci Hansen Duarte Weiss Petrov Adler Bauer Costa "
    "Dietz Engel Fabre Graf Huber Iversen Jansen Krause Lang Meyer Nowak Olsen Pohl Roth Stahl Thiel"
)
CITIES = words(
    "Olten Bergen Lisbon Krakow Ghent Turin Malmo Basel Porto Graz Lyon Bremen "
    "Split Tartu Cork Delft Nantes Zagreb Leeds Varna Evora Kotor Pecs Sibiu"
)
ITEMS = words(
    "clock lamp ladder violin kettle anchor basket mirror carpet saddle engine barrel "
    "lantern compass hammer bottle ribbon candle drum wagon pillow helmet bucket trumpet"
)
STATUSES = words("open paid late void sent held")
ID_PREFIXES = words("KT QX BR ZM LN WD HF VG JP TS")


def digit_pair(rng: random.Random) -> str:
    """Draw two digits, a single token of the tiny tokenizer."""
    return f"{rng.randrange(100):02d}"


def record_id(rng: random.Random) -> str:
    """Draw a record id of a prefix and four digits, such as `KT4821`."""
    return rng.choice(ID_PREFIXES) + digit_pair(rng) + digit_pair(rng)


def amount(rng: random.Random) -> str:
    """Draw an amount of money with two decimals, such as `93.10`."""
    return f"{rng.randrange(10, 100)}.{rng.randrange(100):02d}"


def _one_of(names: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(names)


DRAWS: dict[str, Callable[[random.Random], str]] = {
    **dict.fromkeys(("name", "guest"), lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"),
    **dict.fromkeys(("due", "date"), lambda rng: f"{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"),
    **dict.fromkeys(("city", "place"), _one_of(CITIES)),
    **dict.fromkeys(("item", "content"), _one_of(ITEMS)),
    "status": _one_of(STATUSES),
    "owner": _one_of(FIRST_NAMES),
    "day": _one_of(DAYS),
    "total": amount,
    "bill": record_id,
    "room": digit_pair,
    "code": lambda rng: digit_pair(rng) + digit_pair(rng),
}
"""Field of a record, argument of a tool, or kind of a fact -> how its value is drawn."""

VERBS = words("repaired painted sold carried found borrowed cleaned hid")
ADJECTIVES = words("old small heavy red broken quiet bright narrow")
PLACES = words("market harbour station library bakery garden bridge museum")


def story(rng: random.Random) -> str:
    """Generate a story of six to ten sentences about two people: 80 to 150 tokens of the tiny tokenizer."""
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
    """Generate a prompt of two stories and a continuation of two stories (130 to 300 tokens each)."""
    rng = slot.rng()
    first, second, third, fourth = (story(rng) for _ in range(4))
    return Sample(slot.id, slot.workload, f"{third}\n\n{fourth}", prompt=f"{first}\n\n{second}\n\n", check="none")


FIELDS = words("name city item due total status")
MAX_LINES = 126
"""Maximum lines of all records together: about 1,000 tokens of the tiny tokenizer."""
SIZES = ((6, 10), (11, 16), (17, 22))
"""Minimum and maximum records of small, medium and large samples."""

Record = dict[str, str]
"""Field name -> value."""


def similar_ids(rng: random.Random, count: int) -> list[str]:
    """Generate `count` different ids with at most three prefixes; half of their digit pairs come from a small pool."""
    prefixes = rng.sample(ID_PREFIXES, rng.choice((1, 2, 3)))
    pool = [digit_pair(rng) for _ in range(max(2, count // 3))]

    def pair() -> str:
        return rng.choice(pool) if rng.random() < 0.5 else digit_pair(rng)

    ids: dict[str, None] = {}  # a dict keeps insertion order
    while len(ids) < count:
        ids[rng.choice(prefixes) + pair() + pair()] = None
    return list(ids)


def similar_records(rng: random.Random, count: int, num_fields: int) -> dict[str, Record]:
    """Generate `count` records (id -> record) with the same `num_fields` fields; values repeat between records."""
    fields = rng.sample(FIELDS, num_fields)
    pools = {field: [DRAWS[field](rng) for _ in range(max(3, 2 * count // 3))] for field in fields}
    return {record_id: {field: rng.choice(pools[field]) for field in fields} for record_id in similar_ids(rng, count)}


def question(key: str) -> str:
    return f"{key}? Answer in JSON."


def retrieval(slot: Slot) -> Sample:
    """Generate a question about 6 to 22 records: 200 to 1,000 tokens of the tiny tokenizer.

    Nine consecutive indices combine all SIZES with answers in the early, middle and late third of the lines.
    """
    rng = slot.rng()
    count = rng.randint(*SIZES[slot.index // 3 % 3])
    records = similar_records(rng, count, rng.randint(4, min(6, MAX_LINES // count)))
    lines = [(f"{record_id}.{field}", value) for record_id, record in records.items() for field, value in record.items()]
    third = slot.index % 3
    key, value = lines[rng.randrange(third * len(lines) // 3, (third + 1) * len(lines) // 3)]
    prompt = "Records:\n" + "".join(f"{name}={text}\n" for name, text in lines) + question(key)
    reference = compact_json({key: value})
    return Sample(slot.id, slot.workload, reference, messages=(("user", prompt),), check="json")


TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "get_weather": (("city", "date"), "Check the weather"),
    "book_room": (("city", "guest", "date"), "Book a room"),
    "send_item": (("item", "city"), "Send a parcel"),
    "find_person": (("guest", "city"), "Find somebody"),
    "pay_bill": (("bill", "total"), "Pay a bill"),
    "set_status": (("bill", "status"), "Change the status"),
    "list_items": (("city", "item"), "List the stock"),
    "move_date": (("bill", "date"), "Move a date"),
    "refund": (("bill", "guest", "total"), "Return the money"),
    "call_guest": (("guest", "date"), "Call a guest"),
}
"""Tool -> (argument names, verb phrase of a request)."""


def tool_call(slot: Slot) -> Sample:
    """Generate a declaration of three to six tools, a request for one tool, and its call."""
    rng = slot.rng()
    names = rng.sample(list(TOOLS), rng.randint(3, 6))
    declaration = "\n".join(compact_json({"name": name, "arguments": TOOLS[name][0]}) for name in names)
    name = rng.choice(names)
    argument_names, phrase = TOOLS[name]
    arguments = {argument: DRAWS[argument](rng) for argument in argument_names}
    stated = rng.sample(argument_names, len(argument_names))
    request = f"{phrase}: " + ", ".join(f"{argument}={arguments[argument]}" for argument in stated) + "."
    reference = compact_json({"name": name, "arguments": arguments})
    messages, tools = (("system", declaration), ("user", request)), tuple((tool, TOOLS[tool][0]) for tool in names)
    return Sample(slot.id, slot.workload, reference, messages=messages, check="tool_call", tools=tools)


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
    """Generate a request to copy 16 to 64 symbols or words."""
    rng = slot.rng()
    length = rng.randint(16, 64)
    text = rng.choice((code_like, word_list))(rng, length)
    return Sample(slot.id, slot.workload, text, messages=(("user", f"Copy:\n{text}"),))


SUBJECTS = words("gate safe cabin locker garage office cellar attic")
KINDS = words("code room owner place day content")
ACKNOWLEDGEMENT = "Noted."
UPDATED_SHARE = 0.4


def facts_dialogue(slot: Slot) -> Sample:
    """Generate a dialogue: 4 to 12 facts over several turns, updates of some facts, then one to three questions."""
    rng = slot.rng()
    num_facts = rng.randint(4, 12)
    num_questions = rng.randint(1, 3)
    keys = rng.sample([f"{subject}.{kind}" for subject in SUBJECTS for kind in KINDS], num_facts)

    def value(key: str) -> str:
        return DRAWS[key.split(".")[1]](rng)

    facts = {key: value(key) for key in keys}
    statements = [f"{key}={facts[key]}" for key in keys]
    for key in rng.sample(keys, round(UPDATED_SHARE * num_facts)):
        facts[key] = rng.choice([new for new in (value(key) for _ in range(8)) if new != facts[key]])
        # Insert the update at a random place after the statement that it replaces.
        stated_at = next(i for i, statement in enumerate(statements) if statement.startswith(f"{key}="))
        statements.insert(rng.randint(stated_at + 1, len(statements)), f"{key}->{facts[key]}")
    messages: list[Message] = []
    while statements:
        turn, statements = statements[:3], statements[3:]
        messages += [("user", "Remember:\n" + "\n".join(turn)), ("assistant", ACKNOWLEDGEMENT)]
    for key in rng.sample(keys, num_questions):
        messages += [("user", question(key)), ("assistant", compact_json({key: facts[key]}))]
    *earlier, (_, reference) = messages
    return Sample(slot.id, slot.workload, reference, messages=tuple(earlier), check="json")


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
