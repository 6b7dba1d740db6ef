"""Answers that changed between FP16 and a policy, with the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stages.core.records import Sample
from stages.report.exhibit import Exhibit
from stages.report.text import Excerpt, Segment, differences
from stages.verdict.report import SampleRow
from stages.verdict.thresholds import Status

MOST_ANSWERS = 200
"""Maximum number of shown answers, over all policies."""
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 2_000, 1_000
RANK: tuple[Status, ...] = ("PASS", "INCONCLUSIVE", "FAIL")


@dataclass(frozen=True)
class Flip:
    """An answer that is right with FP16 and wrong with the policy ("lost"), or the reverse ("gained")."""

    policy: int
    """Index of the policy."""
    kind: Literal["lost", "gained"]
    before: list[Segment]
    """The answer of FP16."""
    after: list[Segment]
    """The policy's answer."""


@dataclass
class Card:
    """A sample and its changed answers."""

    row: SampleRow
    prompt: list[tuple[str, Excerpt]]
    """(role, text) per message; empty if the prompt is unknown."""
    reference: Excerpt
    flips: list[Flip] = field(default_factory=list)


@dataclass(frozen=True)
class ChangedAnswers:
    cards: list[Card]
    left_out: dict[int, int]
    """Index of a policy -> number of its changed answers that are not shown, because of MOST_ANSWERS."""
    prompts_missing: bool


def changed_answers(exhibits: Sequence[Exhibit]) -> ChangedAnswers:
    """Return the changed answers, an equal number of each policy at most, lost ones first.

    Answers of passed policies come first, because they show the cost of serving such a policy.
    """
    prompts = {sample.id: sample for exhibit in exhibits for sample in exhibit.samples}
    rank = [RANK.index(exhibit.candidate.verdict) for exhibit in exhibits]
    cards, left_out = dict[tuple[str, str | None], Card](), dict[int, int]()
    most = max(1, MOST_ANSWERS // max(1, len(exhibits)))
    for index, exhibit in enumerate(exhibits):
        rows = [row for row in exhibit.rows if row.judged and bool(row.baseline_correct) != bool(row.candidate_correct)]
        rows.sort(key=lambda row: not row.baseline_correct)
        if len(rows) > most:
            left_out[index] = len(rows) - most
        for row in rows[:most]:
            card = cards.setdefault((row.id, row.reference), _card(row, prompts.get(row.id)))
            # Mask secrets (Excerpt.of) before splitting into words, because a split secret would not be found.
            texts = (row.baseline_generation or "", row.candidate_generation or "")
            before, after = differences(*(Excerpt.of(text, ANSWER_CHARACTERS).whole for text in texts))
            card.flips.append(Flip(index, "lost" if row.baseline_correct else "gained", before, after))
    ordered = sorted(cards.values(), key=lambda c: (min(rank[flip.policy] for flip in c.flips), c.row.workload, c.row.id))
    return ChangedAnswers(ordered, left_out, any(not card.prompt for card in ordered))


def _card(row: SampleRow, sample: Sample | None) -> Card:
    reference = Excerpt.of(row.reference or "", ANSWER_CHARACTERS)
    if sample is None or sample.reference != row.reference:  # another sample with the same id
        return Card(row, [], reference)
    messages = sample.messages or (("prompt", sample.prompt),)
    return Card(row, [(role, Excerpt.of(text, PROMPT_CHARACTERS)) for role, text in messages], reference)
