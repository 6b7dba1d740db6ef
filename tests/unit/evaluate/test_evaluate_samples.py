"""Users' own samples: every bad line is reported with its key and fix, before anything else is read."""

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from evaluations import builtin_workloads
from refusals import refused

from stages.core.errors import UserError
from stages.evaluate.inputs.samples import load_samples, read_jsonl
from stages.workloads.config import Workload
from stages.workloads.generated import WORKLOADS


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


GOOD: dict[str, Any] = {"prompt": "2+2=", "reference": "4"}


def test_the_config_names_the_generators_that_exist() -> None:
    assert set(get_args(Workload)) == set(WORKLOADS)


def test_builtin_samples_are_the_configured_number_of_each() -> None:
    samples = load_samples(builtin_workloads(samples={"prose": 2, "copy": 3, "retrieval": 0}))
    assert [s.workload for s in samples] == ["prose"] * 2 + ["copy"] * 3
    assert samples == load_samples(builtin_workloads(samples={"prose": 2, "copy": 3}))


def test_a_complete_line_becomes_a_sample(tmp_path: Path) -> None:
    line = {
        "id": "a", "workload": "legal", "messages": [{"role": "user", "content": "hi"}], "check": "tool_call",
        "reference": '{"name":"f","arguments":{"x":1}}', "document": "d", "depth": 0.5,
        "tools": [{"name": "f", "arguments": ["x"]}],
    }  # fmt: skip
    (sample,) = read_jsonl(write(tmp_path, line), set())
    assert (sample.id, sample.workload, sample.cluster, sample.depth) == ("a", "legal", "d", 0.5)
    assert (sample.messages, sample.tools) == ((("user", "hi"),), (("f", ("x",)),))


def test_a_file_that_became_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.jsonl")
    with pytest.raises(UserError, match="is no regular file but a pipe"):
        read_jsonl(tmp_path / "mine.jsonl", set())


def test_a_line_may_say_what_is_mentioned_and_how_hard_it_is(tmp_path: Path) -> None:
    line = {
        "prompt": "Code?", "reference": "The code is 4711.", "check": "mention", "mentions": ["4711"],
        "distractors": ["4712"], "difficulty": "hard",
    }  # fmt: skip
    (sample,) = read_jsonl(write(tmp_path, line), set())
    assert (sample.mentions, sample.distractors, sample.difficulty) == (("4711",), ("4712",), "hard")


def test_defaults_fill_what_a_line_leaves_out_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    first, second = read_jsonl(write(tmp_path, GOOD, "", GOOD), set())
    assert (first.id, second.id) == ("mine-0001", "mine-0003")
    assert (first.workload, first.check, first.cluster) == ("custom", "exact", "mine-0001")


def test_the_users_samples_join_the_builtin_ones_and_may_lie_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, GOOD)
    samples = load_samples(builtin_workloads(samples={"copy": 1}, jsonl="~/mine.jsonl"))
    assert [s.id for s in samples] == ["copy-0000", "mine-0001"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "prompt": 3}, "prompt: input should be a valid string"),
        ({"reference": "x"}, "prompt: missing, and so is messages, give exactly one of the two"),
        ({**GOOD, "distractors": ["5"]}, 'distractors: check "exact" does not read them, leave them out or use'),
        ({**GOOD, "mentions": ["4"]}, 'mentions: check "exact" does not read them'),
        ({**GOOD, "check": "mention", "reference": "?"}, "reference: '?' has no word that an answer could mention"),
        ({**GOOD, "check": "mention", "mentions": ["5"]}, "mentions: '5' does not stand in the reference"),
        ({**GOOD, "check": "mention", "mentions": ["!"]}, "mentions: '!' has no word that an answer could mention"),
        ({**GOOD, "check": "mention", "distractors": ["4"]}, "distractors: '4' stands in the reference"),
        ({**GOOD, "check": "mention", "distractors": ["-"]}, "distractors: '-' has no word"),
        ({**GOOD, "check": "mention", "distractors": "5"}, "distractors: input should be a valid array, give a list of texts"),
        ({**GOOD, "difficulty": "trivial"}, "difficulty: input should be '', 'easy', 'medium' or 'hard', give easy, medium or"),
        ({**GOOD, "id": "taken"}, "id: 'taken' was already used, give every sample its own"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_key_and_fix(tmp_path: Path, line: object, message: str) -> None:
    """Other contents of lines: tests/bad_input/work.py."""
    path = write(tmp_path, GOOD, line)
    with refused(UserError, f"{path}:2: {message}"):
        read_jsonl(path, {"taken"})


def test_every_bad_line_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_jsonl(write(tmp_path, "{", GOOD, {"prompt": ""}), set())
    lines = str(caught.value).split("\n")
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["1", "3", "3"]
