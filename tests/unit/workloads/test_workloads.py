"""Generated samples: deterministic, disjoint between splits, derivable and unambiguous, strict JSON, hard distractors."""

import json
import random
import re

import pytest

from stages.core.records import Sample
from stages.workloads.conversation import compact_json
from stages.workloads.generated import WORKLOADS, generate
from stages.workloads.trained import TOOLS, similar_ids, similar_records

COUNT = 60
names = pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "documentation"])
"""Workload names. Python's documentation has fewer than COUNT pages: tests/unit/workloads/test_workloads_chat.py."""


def facts_in(text: str, separator: str) -> list[tuple[str, str]]:
    return re.findall(rf"^(\w+\.\w+){separator}(.+)$", text, flags=re.MULTILINE)


def prompts(samples: list[Sample]) -> set[str]:
    return {sample.prompt + repr(sample.messages) for sample in samples}


@names
def test_same_seed_gives_the_same_samples_and_a_longer_run_extends_them(name: str) -> None:
    assert generate(name, COUNT, 3) == generate(name, COUNT, 3)
    assert generate(name, 5, 3) == generate(name, COUNT, 3)[:5]


@names
def test_splits_and_seeds_share_no_prompt(name: str) -> None:
    drawn = [prompts(generate(name, COUNT, seed, split)) for split in ("train", "calibration", "evaluation") for seed in (0, 1)]
    assert sum(map(len, drawn)) == 6 * COUNT == len(set().union(*drawn))


@names
def test_ids_are_unique_and_name_the_workload(name: str) -> None:
    samples = generate(name, COUNT, 0)
    assert len({sample.id for sample in samples}) == COUNT
    assert all(sample.workload == name and sample.id.startswith(f"{name}-") for sample in samples)
    assert all(bool(sample.prompt) != bool(sample.messages) and sample.reference for sample in samples)


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


def test_multi_turn_answer_is_the_updated_value_where_there_is_one() -> None:
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
