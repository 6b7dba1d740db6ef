"""The user's own samples: every bad line is reported with its key and fix. Prompts: text and token ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints.planted_code import plant_code
from helpers.refusals import refused
from helpers.verdicts.evaluations import builtin_workloads

from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.core.errors import UserError
from stages.core.records import Sample, no_progress
from stages.evaluate.inputs.samples import load_samples, read_jsonl
from stages.quantize.calibration import calibration_texts, texts_from_file, tokenize
from stages.workloads.prompts import all_prompt_ids, render_all


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


GOOD: dict[str, Any] = {"prompt": "2+2=", "reference": "4"}


def test_each_builtin_workload_has_its_configured_number_of_samples() -> None:
    samples = load_samples(builtin_workloads(samples={"prose": 2, "copy": 3, "retrieval": 0}))
    assert [s.workload for s in samples] == ["prose"] * 2 + ["copy"] * 3
    assert samples == load_samples(builtin_workloads(samples={"prose": 2, "copy": 3}))


def test_missing_keys_of_a_line_get_defaults(tmp_path: Path) -> None:
    call = {
        "id": "a", "workload": "legal", "messages": [{"role": "user", "content": "hi"}], "check": "tool_call",
        "reference": '{"name":"f","arguments":{"x":1}}', "document": "d",
        "tools": [{"name": "f", "arguments": ["x"]}],
    }  # fmt: skip
    code = {
        "prompt": "Code?", "reference": "The code is 4711.", "check": "mention", "mentions": ["4711"],
        "distractors": ["4712"], "difficulty": "hard",
    }  # fmt: skip
    first, second, third = read_jsonl(write(tmp_path, call, code, "", GOOD), set())
    assert (first.id, first.workload, first.cluster) == ("a", "legal", "d")
    assert (first.messages, first.tools) == ((("user", "hi"),), (("f", ("x",)),))
    assert (second.mentions, second.distractors, second.difficulty) == (("4711",), ("4712",), "hard")
    assert (third.id, third.workload, third.check, third.cluster) == ("mine-0004", "custom", "exact", "mine-0004")


def test_the_users_samples_are_added_to_the_builtin_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, GOOD)
    samples = load_samples(builtin_workloads(samples={"copy": 1}, jsonl="~/mine.jsonl"))
    assert [s.id for s in samples] == ["copy-0000", "mine-0001"]


def test_a_line_without_an_id_never_gets_a_used_one(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, {**GOOD, "prompt": "1+3="}, {**GOOD, "prompt": "3+1=", "id": "mine-0002"})
    assert [sample.id for sample in read_jsonl(path, {"mine-0001"})] == ["mine-0001_", "mine-0002_", "mine-0002"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "prompt": 3}, "prompt: input should be a valid string (got 3)"),
        ({"reference": "x"}, "prompt: missing, and so is messages, give exactly one of the two"),
        ({**GOOD, "distractors": ["5"]}, 'distractors: check "exact" does not read them, leave them out or use'),
        *(({**GOOD, "check": "mention", key: wrong}, 'reference: check "mention" would judge it wrong, give only words')
          for key, wrong in {"reference": "?", "mentions": ["5"], "distractors": ["4"]}.items()),
        *(({**GOOD, "check": "mention", key: ["!"]}, 'reference: check "mention" would judge it wrong, give only words')
          for key in ("mentions", "distractors")),
        ({**GOOD, "check": "json", "reference": "[" * 2000 + "]" * 2000}, 'reference: check "json" would judge it wrong'),
        ({**GOOD, "check": "mention", "distractors": "5"}, 'distractors: must be a list, as in ["TEXT"] (got "5")'),
        ({**GOOD, "difficulty": "trivial"},
         """difficulty: input should be '', 'easy', 'medium' or 'hard' (got "trivial")"""),
        ({**GOOD, "workload": "a b"}, 'workload: must be 1 to 64 letters, digits, _ and - (got "a b")'),
        ({**GOOD, "id": "\n"}, r'id: must be 1 to 200 characters that can be shown (got "\n")'),
        ({**GOOD, "workload": "long_context"}, "workload: all and names that begin with long_ are reserved"),
        ({**GOOD, "tools": [{"name": "f", "arguments": [], "type": "function"}]}, "tools.0: has type, leave it out"),
        ({**GOOD, "comment": "4"}, "comment: unknown key, move or leave out comment (the keys are "),
        ({"messages": [{"from": "human", "value": "4"}], "reference": "4"}, "messages.0: has from, value, write role, "),
        ({"question": "4", "choices": ["4"], "answer": "4"},
         "question, choices, answer: unknown keys, use prompt for question and use reference for answer and "),
        ({**GOOD, "": 1}, '"": unknown key, move or leave out "" (the keys are id, '),
        ({"conversations": [], "mention": ["4"]}, "conversations, mention: unknown keys, use messages for conv"),
        ({"messages": [{"role": "human", "content": "4"}, {"role": "gpt", "content": 4}], "reference": "4"},
         """messages.0.role: input should be 'system', 'user' or 'assistant' (got "human")"""),
        ({"messages": [{"role": "user", "content": "4"}, {"role": "assistant", "content": "4"}]}, "reference: missing, add it"),
        ({**GOOD, "id": "taken"}, "id: 'taken' was already used, give every sample its own"),
        ({**GOOD, "id": "other"}, "line: repeats the question and the reference of an earlier line (1), leave"),
        ({"messages": [{"role": "assistant", "content": "4"}], "reference": "4"}, "messages: end with a message of"),
        ({"messages": [{"role": "tool", "content": "4"}], "reference": "4"}, "messages.0.role: input should be 'system'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_key_and_fix(tmp_path: Path, line: object, message: str) -> None:
    """Other contents of lines: tests/bad_input/work.py."""
    path = write(tmp_path, GOOD, line)
    with refused(UserError, f"{path}:2: {message}"):
        read_jsonl(path, {"taken"})


def test_every_problem_is_reported_once_with_its_first_line(tmp_path: Path) -> None:
    wrong = [{"prompt": f"question {i}", "answer": "a"} for i in range(60)]  # one line: `answer` is the missing reference
    with pytest.raises(UserError) as caught:
        read_jsonl(write(tmp_path, "{", GOOD, {"prompt": ""}, *wrong, GOOD, GOOD), set())
    lines = str(caught.value).split("\n")
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["1", "3", "3", "4", "64"]
    assert lines[-2].endswith("answer: unknown key, use reference for answer (also in 59 more lines)")


CHAT = Sample(
    id="chat-1", workload="w", reference="blue",
    messages=(("system", "Be brief."), ("user", "Name a colour."), ("assistant", "Where?"), ("user", "The sky.")),
)  # fmt: skip
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role, please') }}"
    "{% elif (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% else %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


def test_code_in_a_model_directory_does_not_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """tests/long/test_commands.py tests the same with a whole command started in the directory."""
    checkpoint, marker = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")), tmp_path / "it-ran"
    plant_code(checkpoint, marker)
    load_tokenizer(checkpoint)
    load_causal_lm(checkpoint)
    assert not marker.exists(), marker.read_text()


def test_messages_are_rendered_by_the_chat_template_with_one_bos(tokenizer: Any) -> None:
    (ids,) = all_prompt_ids(tokenizer, [CHAT])
    turns = [{"role": role, "content": content} for role, content in CHAT.messages]
    assert ids == tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_calibration_and_evaluation_use_the_same_tokens(tokenizer: Any) -> None:
    raw = Sample(id="p", workload="w", prompt="Once upon a time", reference="x")
    texts = render_all(tokenizer, [CHAT, raw])
    assert tokenize(tokenizer, texts, 1024, len(tokenizer)) == all_prompt_ids(tokenizer, [CHAT, raw])


@pytest.mark.parametrize("template", [None, ""])
def test_messages_for_a_base_model_become_lines(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template
    text = "system: Be brief.\nuser: Name a colour.\nassistant: Where?\nuser: The sky.\nassistant: "
    assert render_all(tokenizer, [CHAT]) == [text]
    (ids,) = all_prompt_ids(tokenizer, [CHAT])
    assert ids == tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id


def test_refused_system_messages_are_prepended_to_the_users_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = NO_SYSTEM
    assert render_all(tokenizer, [CHAT]) == ["<|bos|>[user]Be brief.\n\nName a colour.[assistant]Where?[user]The sky."]
    for second, reason in (("user", "roles must alternate"), ("system", "no system role, please")):
        with refused(UserError, f"workloads: the tokenizer's chat_template refuses sample odd-7 ({reason})"):
            render_all(tokenizer, [Sample(id="odd-7", workload="w", messages=(("user", "a"), (second, "b")), reference="x")])


def test_a_template_that_drops_a_question_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    turns = (("user", "a"), ("assistant", "b"), ("user", "Name a colour."))
    with refused(UserError, "workloads: the tokenizer's chat_template drops a user's message of sample odd-7; give another"):
        render_all(tokenizer, [Sample(id="odd-7", workload="w", messages=turns, reference="x")])


def texts_of(checkpoint: Path, out: Path, **options: Any) -> list[str]:
    options = {"samples": 5, "workloads": ["prose", "copy"], "jsonl": None, "seed": 0, "progress": no_progress, **options}
    calibration_texts(checkpoint, out, **options)
    return list(json.loads((out / "texts.json").read_text(encoding="utf-8")))


def test_generated_calibration_texts_start_with_one_bos(tiny_checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    texts = texts_of(tiny_checkpoint, tmp_path)
    assert len(texts) == 5
    for ids in tokenize(tokenizer, texts, 1024, len(tokenizer)):
        assert [number for number, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


def test_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}", encoding="utf-8-sig")
    assert len(read_jsonl(path, set())) == 1
    path.write_bytes(b'\xef\xbb\xbf"one"\r\n\r\n{"text": "two"}\n')
    assert texts_from_file(path, 9) == ["one", "two"]
