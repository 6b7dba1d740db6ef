"""Answers that changed between FP16 and a policy, with the prompt."""

from dataclasses import dataclass

from stages.core.records import Sample
from stages.report.exhibit import Exhibit
from stages.report.text import Segment, differences, excerpt
from stages.verdict.report import SampleRow

MOST_ANSWERS = 200
"""Maximum number of shown answers, over all policies."""
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 2_000, 1_000


@dataclass(frozen=True)
class ChangedAnswer:
    """An answer that is right with FP16 and wrong with the policy ("lost"), or the reverse ("gained")."""

    row: SampleRow
    prompt: list[tuple[str, str]]
    """(role, text) per message; empty if the prompt is unknown."""
    reference: str
    before: list[Segment]
    """The answer of FP16."""
    after: list[Segment]
    """The policy's answer."""

    @property
    def kind(self) -> str:
        return "lost" if self.row.baseline_correct else "gained"


def changed_answers(exhibit: Exhibit, most: int) -> tuple[list[ChangedAnswer], int]:
    """Return up to `most` changed answers of a policy, lost ones first, and the number of other changed answers."""
    prompts = {sample.id: sample for sample in exhibit.samples}
    rows = [row for row in exhibit.rows if row.judged and bool(row.baseline_correct) != bool(row.candidate_correct)]
    rows.sort(key=lambda row: not row.baseline_correct)
    return [_changed(row, prompts.get(row.id)) for row in rows[:most]], len(rows[most:])


def _changed(row: SampleRow, sample: Sample | None) -> ChangedAnswer:
    messages: tuple[tuple[str, str], ...] = ()
    if sample is not None and sample.reference == row.reference:  # another sample may have the same id
        messages = sample.messages or (("prompt", sample.prompt),)
    prompt = [(role, excerpt(text, PROMPT_CHARACTERS)) for role, text in messages]
    texts = (row.reference, row.baseline_generation, row.candidate_generation)
    # An excerpt masks secrets, before it is split into words: a split secret would not be found.
    reference, before, after = (excerpt(text or "", ANSWER_CHARACTERS) for text in texts)
    return ChangedAnswer(row, prompt, reference, *differences(before, after))
