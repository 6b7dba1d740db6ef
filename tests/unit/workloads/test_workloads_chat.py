"""Workloads for chat models: pages about people with four questions each, and pages of Python's documentation."""

import pytest

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.evaluate.inputs.checks import judge, mentions, words_of
from stages.workloads.documentation import SPLITS, pages
from stages.workloads.documents import DIFFICULTIES, QUESTIONS
from stages.workloads.generated import generate

COUNT = 36
each_workload = pytest.mark.parametrize("name", list(QUESTIONS))


def page_of(sample: Sample) -> str:
    """Return the text of the page, without the question of the first example."""
    return sample.messages[0][1].rpartition("\n\n")[0]


def stated_in(sample: Sample) -> str:
    """Return the page, and all of the user's messages except questions."""
    statements = [content for role, content in sample.messages[1:] if role == "user" and "?" not in content]
    return "\n".join([page_of(sample), *statements])


@each_workload
def test_distractors_are_wrong_and_examples_do_not_contain_the_answer(name: str) -> None:
    samples = generate(name, COUNT, 0)
    for sample in samples:
        assert sample.check == "mention"
        assert judge(sample, sample.reference)
        for distractor in sample.distractors:
            assert not judge(sample, sample.reference.replace(sample.mentions[0], distractor))
        examples = words_of(" ".join(content for role, content in sample.messages if role == "assistant"))
        assert not any(mentions(examples, words_of(phrase)) for phrase in sample.mentions), sample.id
        stated = words_of(stated_in(sample))
        assert any(mentions(stated, words_of(distractor)) for distractor in sample.distractors)
        assert not set(sample.mentions) & set(sample.distractors)
    counts = [{len(sample.distractors) for sample in samples if sample.difficulty == level} for level in DIFFICULTIES]
    assert max(counts[0]) <= min(counts[1]) <= max(counts[1]) < min(counts[2]), "harder samples have more"


def test_calibration_and_evaluation_share_no_sentence() -> None:
    paragraphs = [{paragraph for page in pages(split) for paragraph in page} for split in SPLITS]
    assert len(set().union(*paragraphs)) == sum(map(len, paragraphs)), "splits share no paragraph"
    calibrated = " ".join(s.prompt + s.reference for s in generate("documentation", 30, 0, "calibration"))
    calibrated += " ".join(content for s in generate("quotation", COUNT, 0, "calibration") for _, content in s.messages)
    quoted = {phrase for s in generate("quotation", COUNT, 0) for phrase in s.mentions}
    assert not [phrase for phrase in quoted if phrase in calibrated]


def test_documentation_is_not_judged_and_no_page_is_used_twice() -> None:
    samples = generate("documentation", 24, 0)
    assert {sample.check for sample in samples} == {"none"}
    assert all(len(sample.prompt) > 500 and len(sample.reference) > 500 for sample in samples)
    assert samples != generate("documentation", 24, 1)
    count = len(pages("evaluation"))
    every_page = generate("documentation", count, 0)
    assert (every_page[:24], len({sample.prompt for sample in every_page})) == (samples, count)
    with pytest.raises(UserError, match=rf"documentation: .* {count} pages .* page {count + 1}; ask for fewer"):
        generate("documentation", count + 1, 0)
