"""Conversations and prompts as token ids, for every kind of tokenizer, and never with two BOS tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hostile import plant_code
from refusals import refused

from pipeline.config.config import CalibrationConfig
from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.quantize.calibration import calibration_texts, tokenize
from stages.workloads.prompts import all_prompt_ids, render_all

CHAT = Sample(
    id="chat-1", workload="w", reference="blue",
    messages=(("system", "Be brief."), ("user", "Which colour?"), ("assistant", "Of what?"), ("user", "The sky.")),
)  # fmt: skip
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role, please') }}"
    "{% elif (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% else %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


def test_code_beside_a_model_is_not_run_where_the_model_and_its_tokenizer_are_loaded(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """tests/long/test_hostile_directory.py tests the same with a whole command started in the directory."""
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


def test_calibration_sees_the_tokens_that_evaluation_feeds(tokenizer: Any) -> None:
    raw = Sample(id="p", workload="w", prompt="Once upon a time", reference="x")
    texts = render_all(tokenizer, [CHAT, raw])
    assert tokenize(tokenizer, texts, 1024, len(tokenizer)) == all_prompt_ids(tokenizer, [CHAT, raw])


@pytest.mark.parametrize("template", [None, ""])
def test_a_base_models_messages_become_lines_with_the_assistants_turn_opened(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template
    text = "system: Be brief.\nuser: Which colour?\nassistant: Of what?\nuser: The sky.\nassistant: "
    assert render_all(tokenizer, [CHAT]) == [text]
    (ids,) = all_prompt_ids(tokenizer, [CHAT])
    assert ids == tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id


def test_a_template_without_a_system_role_gets_its_text_in_the_users_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = NO_SYSTEM
    assert render_all(tokenizer, [CHAT]) == ["<|bos|>[user]Be brief.\n\nWhich colour?[assistant]Of what?[user]The sky."]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((("user", "a"), ("user", "b")), "roles must alternate"),
        ((("user", "a"), ("system", "b")), "no system role, please"),
    ],
)
def test_messages_that_a_template_refuses_are_named(tokenizer: Any, messages: Any, reason: str) -> None:
    tokenizer.chat_template = NO_SYSTEM
    with refused(UserError, f"workloads: the tokenizer's chat_template refuses sample odd-7 ({reason})"):
        render_all(tokenizer, [Sample(id="odd-7", workload="w", messages=messages, reference="x")])


def test_generated_calibration_texts_start_with_one_bos(tiny_checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    calibration_texts(
        tiny_checkpoint,
        tmp_path,
        samples=5,
        workloads=["prose", "copy"],
        jsonl=None,
        seed=0,
        progress=lambda *one: told.append(one),
    )
    assert [one for one in told if "texts" in one[0]] == [("rendering [texts]", 0, 5)]
    texts = json.loads((tmp_path / "texts.json").read_text(encoding="utf-8"))
    assert len(texts) == 5
    for ids in tokenize(tokenizer, texts, 1024, len(tokenizer)):
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_the_users_calibration_file_may_lie_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.jsonl").write_text('"one"\n{"text": "two"}\n"three"\n', encoding="utf-8")
    config = CalibrationConfig(samples=2, max_length=16, workloads=["prose"], jsonl="~/mine.jsonl")
    calibration_texts(
        tmp_path, tmp_path, samples=2, workloads=config.workloads, jsonl=config.file, seed=0, progress=lambda *_: None
    )
    assert json.loads((tmp_path / "texts.json").read_text(encoding="utf-8")) == ["one", "two"]
