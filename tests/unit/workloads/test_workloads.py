"""Generated samples are reproducible and disjoint between splits, and have one answer; a model gets workloads that suit it."""

import json
import math
import shutil
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from helpers.verdicts.evaluations import builtin_workloads

from pipeline.cli.next_steps import MAX_QUESTIONS
from pipeline.config.compose import plan
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import GateRefusal, UserError
from stages.core.records import Sample
from stages.evaluate.decoding.stored import JudgedAnswer, Round, refuse_weak
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.checks import judge, mentions, words_of
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.workloads.documentation import SPLITS, pages
from stages.workloads.documents import DIFFICULTIES, QUESTIONS
from stages.workloads.generated import WORKLOADS, generate

COUNT = 20


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"documentation"}))
def test_samples_depend_only_on_workload_split_and_seed(name: str) -> None:
    """A test below covers documentation, whose seeds only reorder its pages."""
    assert generate(name, 5, 3) == generate(name, COUNT, 3)[:5]
    drawn = [generate(name, COUNT, seed, split) for split in ("train", "calibration", "evaluation") for seed in (0, 1)]
    assert len({sample.prompt + repr(sample.messages) for samples in drawn for sample in samples}) == 6 * COUNT
    for samples in drawn:
        assert [sample.id for sample in samples] == [f"{name}-{i:04d}" for i in range(COUNT)]
        assert all(sample.workload == name and sample.reference for sample in samples)
        assert all(bool(sample.prompt) != bool(sample.messages) for sample in samples)


TRAINED = {
    "prose": "71fe12a39b3b4238",
    "retrieval": "36871c2dc4a5d7b2",
    "tool_call": "0dbbef0cfd9e210f",
    "copy": "20ceb0ad2f8371fc",
    "multi_turn": "9d7bd25bf79291aa",
}
"""Workload -> start of the digest of its samples. The tiny model was trained on these texts; a change needs a new model."""


@pytest.mark.parametrize("name", TRAINED)
def test_workloads_of_the_tiny_model_are_unchanged(name: str) -> None:
    samples = generate(name, 60, 0)
    assert sha256(json.dumps([asdict(sample) for sample in samples]).encode()).hexdigest().startswith(TRAINED[name])
    assert name == "prose" or all(judge(sample, sample.reference) for sample in samples)


TINY = locate_checkpoint("pkg://stages.tiny/checkpoint")


def without_template(folder: Path) -> Path:
    """Copy the tiny model's tokenizer without its chat template."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "workload", "calibration_workload"),
    [
        ([], "copy", "copy"),
        (["model.path=/other"], "lookup", "lookup"),
        (["model.path=/other", "workloads.samples.lookup=3"], "lookup", "lookup"),
        (["model.path=/other", "workloads=builtin"], "copy", "lookup"),
    ],
)
def test_a_model_gets_suitable_questions_and_calibration(
    arguments: list[str], workload: str, calibration_workload: str
) -> None:
    lookups = 3 if "workloads.samples.lookup=3" in arguments else 144
    for config in plan([*arguments, "kv=fp8,int8"], multirun=True).jobs:
        assert workload in config.workloads.samples
        assert calibration_workload in config.calibration.workloads
        assert config.workloads.samples.get("lookup") in (None, lookups)


def test_a_newline_ends_the_one_line_answers_of_a_base_model(tmp_path: Path) -> None:
    pages, tiny = builtin_workloads(samples={"lookup": 1}), builtin_workloads(samples={"copy": 1})
    base, chat = BundleTokenizer(without_template(tmp_path / "base")), BundleTokenizer(TINY)
    (line,) = base.text_ids("\n")
    assert (base.stop_tokens(pages), base.stop_tokens(tiny)) == ((line, *base.ends), base.ends)
    assert chat.stop_tokens(pages) == chat.ends
    (item,) = encode(generate("lookup", 1, seed=0, split="evaluation"), base, 192, base.stop_tokens(pages)[0])
    assert item.reference[-1] == line
    assert base.text(item.prompt).endswith("assistant: ")


def test_a_weak_baseline_is_refused_with_its_wrong_answers() -> None:
    turn = ("user", "page " * 99 + "Which\nnumber? password=hunter42")
    samples = [Sample(id=f"q{i}", workload="own", reference="It is 7.", messages=(turn,)) for i in range(60)]
    encoded = [EncodedSample(sample, (1, 2), (3,)) for sample in samples]
    steps = StepStatistics(*np.full((5, 1), -math.log(0.004)))
    answers = {sample.id: JudgedAnswer("Seven.\x1b" + "so " * 99, correct=sample.id == "q0") for sample in samples}
    measured = Round.model_construct(answers=answers, statistics=dict.fromkeys(answers, steps))
    with pytest.raises(GateRefusal) as refusal:
        refuse_weak(encoded, measured, 0.02)
    message, line, *others = str(refusal.value).splitlines()
    assert message.startswith(
        "FP16 itself answers 1 of 60 questions of own (mean probability of the references 0.4 %): this workload cannot be "
        "judged, and no candidate was run; gates.min_baseline_probability is 2 %; ask questions that this model answers: "
    )
    assert len(others) == 2
    assert line.isprintable()
    assert "hunter42" not in line
    assert line.startswith('q1 (check "exact"): asked \'...')
    assert "Which number? password=***', expected 'It is 7.', answered 'Seven.?so so" in line
    assert len(line) < 500
    refuse_weak(encoded, measured, 0.004)
    # Most answers are right, but worded differently: the shown answers are the right ones.
    right = {name: JudgedAnswer("The number is 7.", correct=name != "q0") for name in answers}
    with pytest.raises(GateRefusal, match="answers 59 of 60") as refusal:
        refuse_weak(encoded, measured.model_copy(update={"answers": right}), 0.02)
    assert [line.split(" ", 1)[0] for line in str(refusal.value).splitlines()[1:]] == ["q1", "q2", "q3"]


CHATS = 36


def page_of(sample: Sample) -> str:
    """Return the text of the page, without the question of the first example."""
    return sample.messages[0][1].rpartition("\n\n")[0]


def stated_in(sample: Sample) -> str:
    """Return the page, and all of the user's messages except questions."""
    statements = [content for role, content in sample.messages[1:] if role == "user" and "?" not in content]
    return "\n".join([page_of(sample), *statements])


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_distractors_are_wrong_and_examples_do_not_contain_the_answer(name: str) -> None:
    samples = generate(name, CHATS, 0)
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
    calibrated += " ".join(content for s in generate("quotation", CHATS, 0, "calibration") for _, content in s.messages)
    quoted = {phrase for s in generate("quotation", CHATS, 0) for phrase in s.mentions}
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
    assert builtin_workloads(length_documents=MAX_QUESTIONS).length_documents, "a next step may ask for so many"
    more = builtin_workloads(samples={"documentation": 24, "lookup": 24}).more_questions(4.0)
    assert {f"workloads.samples.documentation={count}", "workloads.samples.lookup=96"} <= set(more)
