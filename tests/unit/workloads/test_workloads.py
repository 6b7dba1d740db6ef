"""Workloads that suit a model, and generated samples: deterministic, disjoint between splits, derivable, unambiguous."""

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest
from helpers.verdicts.evaluations import builtin_workloads

from pipeline.config.compose import plan
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import CannotBeJudged
from stages.core.records import Sample
from stages.evaluate.decoding.rows import Answer
from stages.evaluate.decoding.stored import Round, require_able
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.workloads.conversation import compact_json
from stages.workloads.generated import WORKLOADS, generate
from stages.workloads.trained import TOOLS, similar_ids, similar_records

COUNT = 60
names = pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "documentation"])
"""Workload names. Python's documentation has fewer than COUNT pages: tests/unit/workloads/test_workloads_chat.py."""


def facts_in(text: str, separator: str) -> list[tuple[str, str]]:
    return re.findall(rf"^(\w+\.\w+){separator}(.+)$", text, flags=re.MULTILINE)


@names
def test_samples_follow_from_name_split_and_seed_and_no_two_are_equal(name: str) -> None:
    assert generate(name, 5, 3) == generate(name, COUNT, 3)[:5]
    drawn = [generate(name, COUNT, seed, split) for split in ("train", "calibration", "evaluation") for seed in (0, 1)]
    assert len({sample.prompt + repr(sample.messages) for samples in drawn for sample in samples}) == 6 * COUNT
    for samples in drawn:
        assert [sample.id for sample in samples] == [f"{name}-{i:04d}" for i in range(COUNT)]
        assert all(sample.workload == name and sample.reference for sample in samples)
        assert all(bool(sample.prompt) != bool(sample.messages) for sample in samples)


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"prose, retrieval.*got 'poetry'"):
        generate("poetry", 1, 0)


def test_retrieval_answer_is_the_one_line_with_the_asked_key() -> None:
    for sample in generate("retrieval", COUNT, 0):
        (_, content), lines = sample.messages[0], dict(facts_in(sample.messages[0][1], "="))
        assert len(lines) == len(facts_in(content, "=")), "a key must not occur twice"
        key = content.splitlines()[-1].split("?")[0]
        assert sample.check == "json"
        assert json.loads(sample.reference) == {key: lines[key]}
        assert sample.reference == compact_json({key: lines[key]})


def test_retrieval_depth_is_where_the_line_stands_and_covers_early_middle_and_late() -> None:
    samples = generate("retrieval", COUNT, 0)
    for sample in samples:
        content = sample.messages[0][1]
        ((key, value),) = json.loads(sample.reference).items()
        assert sample.depth == content.index(f"{key}={value}\n") / len(content)
    thirds = [[s.depth or 0.0 for s in samples[third::3]] for third in range(3)]
    assert max(thirds[0]) < 0.4
    assert min(thirds[2]) > 0.6
    assert 0.25 < min(thirds[1]) <= max(thirds[1]) < 0.7


def test_distractors_share_prefixes_digit_pairs_and_values() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        ids = similar_ids(rng, 20)
        assert len(set(ids)) == 20
        assert len({i[:2] for i in ids}) <= 3
        assert len({i[2:4] for i in ids}) < 20
        assert len({i[4:6] for i in ids}) < 20
        records = list(similar_records(rng, 20, 6).values())
        assert all(len({record[field] for record in records}) < 20 for field in records[0])


def test_tool_call_is_valid_against_the_offered_tools_and_copies_the_request() -> None:
    for sample in generate("tool_call", COUNT, 0):
        (_, declared), (_, request) = sample.messages
        offered = {tool["name"]: tool["arguments"] for tool in map(json.loads, declared.splitlines())}
        assert {name: tuple(arguments) for name, arguments in offered.items()} == dict(sample.tools)
        call = json.loads(sample.reference)
        assert set(call) == {"name", "arguments"}
        assert list(call["arguments"]) == offered[call["name"]]
        phrase, stated = request.removesuffix(".").split(": ")
        assert TOOLS[call["name"]][1] == phrase
        assert dict(part.split("=") for part in stated.split(", ")) == call["arguments"]


def test_multi_turn_answer_is_the_updated_value_if_there_is_an_update() -> None:
    updated = 0
    for sample in generate("multi_turn", COUNT, 0):
        user_text = "\n".join(content for role, content in sample.messages if role == "user")
        stated, updates = facts_in(user_text, "="), facts_in(user_text, "->")
        assert len(dict(stated)) == len(stated)
        assert len(dict(updates)) == len(updates), "a fact is updated at most once"
        for key, value in updates:
            assert user_text.index(f"{key}={dict(stated)[key]}") < user_text.index(f"{key}->{value}")
        key = sample.messages[-1][1].split("?")[0]
        assert json.loads(sample.reference) == {key: {**dict(stated), **dict(updates)}[key]}
        updated += key in dict(updates)
    assert COUNT // 6 < updated < COUNT * 5 // 6


def test_copy_answer_is_the_text_of_the_request() -> None:
    for sample in generate("copy", COUNT, 0):
        assert sample.messages[0][1] == f"Copy:\n{sample.reference}"


TINY = locate_checkpoint("pkg://stages.tiny/checkpoint")


def another(folder: Path, *, template: bool = True) -> Path:
    """Copy the tiny model's tokenizer with an additional word, to represent another model's tokenizer."""
    shutil.copytree(TINY, folder)
    tokenizer, config = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer["model"]["vocab"]["another"] = len(tokenizer["model"]["vocab"]) + 100
    if not template:
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "asked", "calibrated"),
    [
        ([], "copy", "copy"),
        (["model.path={copy}"], "copy", "copy"),  # the tiny model in another place
        (["model.path={other}"], "lookup", "lookup"),
        (["model.path={other}", "workloads.samples.lookup=3"], "lookup", "lookup"),
        (["model.path={other}", "workloads=builtin"], "copy", "lookup"),
        (["model.path=/nowhere"], "lookup", "lookup"),
        (["model.path={other}", "stage=tune"], "lookup", "lookup"),
    ],
)
def test_a_model_gets_questions_and_calibration_texts_that_suit_it(
    arguments: list[str], asked: str, calibrated: str, tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "copy")
    places = {"copy": tmp_path / "copy", "other": another(tmp_path / "other")}
    given = [argument.format(**places) for argument in arguments]
    for config in plan([*given, "kv=fp8,int8"], multirun=True).jobs:
        assert asked in config.workloads.samples
        assert calibrated in config.calibration.workloads
        assert config.workloads.samples.get("lookup") in (None, 3 if len(given) == 2 and "lookup=3" in given[1] else 144)


def test_few_shot_text_ends_an_answer_as_it_ends_a_line(tmp_path: Path) -> None:
    pages, tiny = builtin_workloads(samples={"lookup": 1}), builtin_workloads(samples={"copy": 1})
    base, chat = BundleTokenizer(another(tmp_path / "base", template=False)), BundleTokenizer(TINY)
    (line,) = base.text_ids("\n")
    assert (base.stop_tokens(pages), base.stop_tokens(tiny)) == ((line, *base.ends), base.ends)
    assert chat.stop_tokens(pages) == chat.ends
    (item,) = encode(generate("lookup", 1, seed=0, split="evaluation"), base, 192, base.stop_tokens(pages)[0])
    assert item.reference[-1] == line
    assert base.text(item.prompt).endswith("assistant: ")


def measured(right: int, asked: int, probability: float) -> tuple[list[EncodedSample], Round]:
    """Return a round of one workload; right answers, of one token, have the given probability."""
    samples = generate("lookup", asked, seed=0, split="evaluation")
    encoded = [EncodedSample(sample, (1, 2), (3,)) for sample in samples]
    steps = StepStatistics.empty(1)
    steps.baseline_nll[:] = -math.log(probability)
    answers = {s.id: Answer("", i < right) for i, s in enumerate(samples)}
    return encoded, Round.model_construct(answers=answers, statistics=dict.fromkeys(answers, steps))


def test_a_baseline_that_cannot_answer_is_reported_and_no_candidate_runs() -> None:
    encoded, weak = measured(1, 60, 0.004)
    with pytest.raises(CannotBeJudged) as refusal:
        require_able(encoded, weak, 0.02)
    assert str(refusal.value) == (
        "FP16 itself answers 1 of 60 questions of lookup (0.4 % probable in the mean): this kind of work cannot be judged, and "
        "no candidate was run"
    )
    assert (refusal.value.weak, refusal.value.able) == (["lookup"], [])
    assert [line.partition(" ")[0] for line in refusal.value.wrong] == [item.sample.id for item in encoded[1:4]]
    require_able(*measured(1, 60, 0.03), 0.02)
    require_able(encoded, weak, 0.0)


def test_a_wrong_answer_is_shown_cut_on_one_line_and_without_secrets() -> None:
    asked = Sample(
        id="q", workload="own", reference="It is 7.", messages=(("user", "page " * 99 + "Which\nnumber? password=hunter42"),)
    )
    steps = StepStatistics.empty(1)
    steps.baseline_nll[:] = 9.0
    said = Answer("Seven.\x1b" + "so " * 99, correct=False)
    weak = Round.model_construct(answers={"q": said}, statistics={"q": steps})
    with pytest.raises(CannotBeJudged) as refusal:
        require_able([EncodedSample(asked, (1, 2), (3,))], weak, 0.02)
    (line,) = refusal.value.wrong
    assert line.isprintable()
    assert "hunter42" not in line
    assert line.startswith('q (check "exact"): asked \'...')
    assert "Which number? password=***', expected 'It is 7.', answered 'Seven.?so so" in line
    assert len(line) < 500
