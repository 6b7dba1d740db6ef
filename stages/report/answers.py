"""Answers that a policy lost or gained, beside those of FP16, with their prompts; as many as a page has room for."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import escape

from pipeline.core.records import Sample
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import Status
from stages.report.exhibit import Exhibit
from stages.report.text import Segment, cut, differences, shown

ROOM = 700_000
"""Characters of HTML that answers and prompts may take up in all."""
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 6_000, 2_000
MARKUP = 900
"""Characters of HTML around an answer, about."""

RANK: tuple[Status, ...] = ("PASS", "INCONCLUSIVE", "FAIL")

Kind = Literal["lost", "gained"]


@dataclass(frozen=True)
class Excerpt:
    """A text, cut in its middle where it is long."""

    head: str
    tail: str
    left_out: int

    @classmethod
    def of(cls, text: str, limit: int) -> "Excerpt":
        return cls(*cut(shown(text), limit))

    @property
    def room(self) -> int:
        return len(escape(self.head)) + len(escape(self.tail))


@dataclass(frozen=True)
class Flip:
    """An answer that one of the two engines got right."""

    policy: int
    """Index of the policy."""
    kind: Kind
    before: list[Segment]
    """The answer of FP16."""
    after: list[Segment]
    left_out: int
    """Characters that are left out of the two answers."""

    @property
    def room(self) -> int:
        return MARKUP + sum(len(escape(text)) + 15 for _, text in (*self.before, *self.after))


@dataclass
class Card:
    """A sample with the answers that changed."""

    row: SampleRow
    prompt: list[tuple[str, Excerpt]]
    """(role, text) of each message; empty where the prompt is not here."""
    reference: Excerpt
    flips: list[Flip] = field(default_factory=list)

    @property
    def room(self) -> int:
        return MARKUP + self.reference.room + sum(excerpt.room for _, excerpt in self.prompt)


@dataclass(frozen=True)
class Answers:
    cards: list[Card]
    shown: int
    """Answers that are on the page."""
    left_out: dict[int, int]
    """Index of a policy -> its answers for which there was no room."""
    prompts_missing: bool


def changed_answers(exhibits: Sequence[Exhibit], room: int = ROOM) -> Answers:
    """Return the answers that changed: some of each policy, workload and kind before more of any.

    Those of policies that passed come first, of failed ones last: they are what serving such a policy would cost.
    """
    groups: dict[tuple[int, str, Kind], deque[SampleRow]] = {}
    for index, exhibit in enumerate(exhibits):
        for row in exhibit.rows:
            kind = _kind(row)
            if kind is not None:
                groups.setdefault((index, row.workload, kind), deque()).append(row)
    prompts = {sample.id: sample for exhibit in exhibits for sample in exhibit.samples}
    cards: dict[tuple[str, str | None], Card] = {}
    count = 0
    rank = [RANK.index(exhibit.candidate.verdict) for exhibit in exhibits]
    waiting = deque(sorted(groups, key=lambda key: (rank[key[0]], key[2] != "lost", key[1], key[0])))
    while waiting:
        key = waiting.popleft()
        row = groups[key][0]
        flip = _flip(row, key[0], key[2])
        card = cards.get((row.id, row.reference)) or _card(row, prompts.get(row.id))
        room -= flip.room + (0 if card.flips else card.room)
        if room < 0:
            break
        groups[key].popleft()
        count += 1
        card.flips.append(flip)
        cards[row.id, row.reference] = card
        if groups[key]:
            waiting.append(key)
    left_out: dict[int, int] = {}
    for (policy, _, _), rows in groups.items():
        if rows:
            left_out[policy] = left_out.get(policy, 0) + len(rows)
    ordered = sorted(
        cards.values(), key=lambda card: (min(rank[flip.policy] for flip in card.flips), card.row.workload, card.row.id)
    )
    for card in ordered:
        card.flips.sort(key=lambda flip: flip.policy)
    return Answers(ordered, count, left_out, any(not card.prompt for card in ordered))


def _kind(row: SampleRow) -> Kind | None:
    if not row.judged or bool(row.baseline_correct) == bool(row.candidate_correct):
        return None
    return "lost" if row.baseline_correct else "gained"


def _flip(row: SampleRow, policy: int, kind: Kind) -> Flip:
    # Secrets go before texts are cut into pieces, which would hide them from the search.
    before, after = (Excerpt.of(text or "", ANSWER_CHARACTERS) for text in (row.baseline_generation, row.candidate_generation))
    texts = (f"{one.head} … {one.tail}" if one.left_out else one.head for one in (before, after))
    return Flip(policy, kind, *differences(*texts), before.left_out + after.left_out)


def _card(row: SampleRow, sample: Sample | None) -> Card:
    reference = Excerpt.of(row.reference or "", ANSWER_CHARACTERS)
    if sample is None or sample.reference != row.reference:  # of another sample with the same name
        return Card(row, [], reference)
    messages = sample.messages or (("prompt", sample.prompt),)
    return Card(row, [(role, Excerpt.of(text, PROMPT_CHARACTERS)) for role, text in messages], reference)
