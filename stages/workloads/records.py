"""The retrieval workload: many similar records, and a question about one field of one of them.

Records are written flat, one field per line (`KT4821.total=93.10`), and the answer is `{"KT4821.total":"93.10"}`.
Distractors are hard: ids share prefixes and digit pairs, and values come from small pools, so that names, dates and
amounts repeat between records. A key occurs once in the records, so the answer is unambiguous.
"""

import random
from collections.abc import Callable

from pipeline.core.records import Sample
from stages.workloads.conversation import Slot, compact_json
from stages.workloads.vocabulary import CITIES, ID_PREFIXES, ITEMS, STATUSES, amount, digit_pair, full_name, short_date

FIELDS: dict[str, Callable[[random.Random], str]] = {
    "name": full_name,
    "city": lambda rng: rng.choice(CITIES),
    "item": lambda rng: rng.choice(ITEMS),
    "due": short_date,
    "total": amount,
    "status": lambda rng: rng.choice(STATUSES),
}
MAX_LINES = 126
"""About 1,000 tokens of the tiny tokenizer."""
SIZES = ((6, 10), (11, 16), (17, 22))
"""Fewest and most records of small, medium and large samples."""

Record = dict[str, str]
"""Field -> value."""


def similar_ids(rng: random.Random, count: int) -> list[str]:
    """Generate `count` different ids out of at most three prefixes, half of their digit pairs from a small pool."""
    prefixes = rng.sample(ID_PREFIXES, rng.choice((1, 2, 3)))
    pool = [digit_pair(rng) for _ in range(max(2, count // 3))]

    def pair() -> str:
        return rng.choice(pool) if rng.random() < 0.5 else digit_pair(rng)

    ids: dict[str, None] = {}  # a dict keeps the order of insertion
    while len(ids) < count:
        ids[rng.choice(prefixes) + pair() + pair()] = None
    return list(ids)


def similar_records(rng: random.Random, count: int, num_fields: int) -> dict[str, Record]:
    """Generate `count` records by id with the same `num_fields` fields; values repeat between records."""
    fields = rng.sample(list(FIELDS), num_fields)
    pools = {field: [FIELDS[field](rng) for _ in range(max(3, 2 * count // 3))] for field in fields}
    return {record_id: {field: rng.choice(pools[field]) for field in fields} for record_id in similar_ids(rng, count)}


def question(key: str) -> str:
    """Return the user's question for one key."""
    return f"{key}? Answer in JSON."


def retrieval(slot: Slot) -> Sample:
    """Generate a question over 6 to 22 records, 200 to 1,000 tokens of the tiny tokenizer.

    Nine consecutive indices pair each of the SIZES with the early, middle and late third of the lines. The depth of a sample
    is the relative position of the answer's line in the user's turn.
    """
    rng = slot.rng()
    count = rng.randint(*SIZES[slot.index // 3 % 3])
    records = similar_records(rng, count, rng.randint(4, min(6, MAX_LINES // count)))
    lines = [(f"{record_id}.{field}", value) for record_id, record in records.items() for field, value in record.items()]
    third = slot.index % 3
    key, value = lines[rng.randrange(third * len(lines) // 3, (third + 1) * len(lines) // 3)]
    prompt = "Records:\n" + "".join(f"{one}={of_one}\n" for one, of_one in lines) + question(key)
    reference, depth = compact_json({key: value}), prompt.index(f"{key}=") / len(prompt)
    return Sample(slot.id, slot.workload, reference, messages=(("user", prompt),), check="json", depth=depth)
