"""Tests that loaded tokenizers encode as tokenizer.json says, and that references and answers end at the stop tokens."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints.gguf_files import TOKENS, random_model, write_gguf
from helpers.checkpoints.planted_code import changed
from helpers.engines.fake import EOS, CharTokenizer, FakeEngine, OnePassFake, SharingFake, fake_engine
from helpers.registry.judged_engine import TINY
from helpers.verdicts.evaluations import builtin_workloads
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.files import end_tokens
from stages.checkpoints.gguf.model import inspect_gguf
from stages.checkpoints.intake.opening import TEXTS, check_loadable
from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.engines.bundle import copy_tokenizer
from stages.evaluate.decoding.decode import StoppingCriteria, decode
from stages.evaluate.decoding.free import free_answers
from stages.evaluate.decoding.stored import SampleResult
from stages.evaluate.inputs.tokens import BundleTokenizer, encode

PAD, END, USER = 5, 1, 3
TOOL_CALL = 4
"""Another stop token of the fake model, which does not occur in its references."""
STOPPING = StoppingCriteria((EOS, TOOL_CALL), 4)
SAMPLES = [Sample(id=name, workload="w", prompt=name * 3, reference=f"answer {name}", check="exact") for name in "abc"]


def checkpoint(directory: Path, generation: object, config: object, **tokenizer: object) -> Path:
    """Copy the tiny model's checkpoint with other stop tokens and other keys in tokenizer_config.json."""
    shutil.copytree(TINY, directory)
    ends = {"generation_config.json": {"eos_token_id": generation}, "config.json": {"eos_token_id": config}}
    for name, changes in {**ends, "tokenizer_config.json": tokenizer}.items():
        content = json.loads((directory / name).read_text()) | changes
        (directory / name).write_text(json.dumps(content))
    (directory / "special_tokens_map.json").unlink()
    return directory


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([PAD, END], None, (PAD, END)), (END, [PAD, END], (END, PAD)), (None, END, (END,)), ([-1, END], [], (END,))],
)
def test_both_files_define_stop_tokens(generation: object, config: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", generation, config)
    assert end_tokens(folder) == expected
    (tmp_path / "bundle").mkdir()
    copy_tokenizer(folder, tmp_path / "bundle")
    assert end_tokens(tmp_path / "bundle") == expected


NEXT_TURN_ENDS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
TURN_ENDS = NEXT_TURN_ENDS.replace("{% endfor", "<|end|>{% endfor")


@pytest.mark.parametrize(
    ("template", "ends", "first"),
    [
        (TURN_ENDS, [PAD, END], END),  # the eos token differs from the token that ends a turn, as in Gemma and Phi
        (NEXT_TURN_ENDS, [PAD, USER], USER),  # the next turn's first token ends a turn, as in GLM-4
        ("{{ messages[0]['content'] }}", [PAD, END], PAD),
        ("{{ messages[1] and raise_exception('one turn') }}{{ messages[0]['content'] }}", [PAD, END], PAD),
    ],
)
def test_a_reference_ends_as_the_chat_template_ends_a_turn(template: str, ends: list[int], first: int, tmp_path: Path) -> None:
    tokenizer = BundleTokenizer(checkpoint(tmp_path / "model", ends, PAD, eos_token="<|pad|>", chat_template=template))
    stops = tokenizer.stop_tokens(builtin_workloads(samples={"copy": 1}))
    assert (stops[0], set(stops), set(tokenizer.ends)) == (first, set(ends), set(ends))
    sample = Sample(id="s", workload="w", messages=(("user", "Hi"),), reference="04", check="exact")
    assert encode([sample], tokenizer, 9)[0].reference[-1] == first


def ends_differently(engine: FakeEngine) -> FakeEngine:
    """Make the engine end every answer with TOOL_CALL."""
    engine.answers = {prompt: (*answer[:-1], TOOL_CALL) for prompt, answer in engine.answers.items()}
    return engine


@pytest.mark.parametrize("kind", [FakeEngine, OnePassFake, SharingFake])
def test_an_answer_ends_at_any_stop_token_and_keeps_it(kind: type[FakeEngine]) -> None:
    items = encode(SAMPLES, CharTokenizer(), 9)
    engine = ends_differently(kind(fake_engine(SAMPLES).answers))
    answers = {event.sample: event.answer for event in decode(engine, items, 2, STOPPING) if isinstance(event, SampleResult)}
    assert [answers[i] for i in range(3)] == [(*item.reference[:-1], TOOL_CALL) for item in items]
    free = free_answers(engine, items, 2, STOPPING, decoded=[answers[0], None, None])
    assert (free.samples, free.contradictions) == (3, [])


def test_the_ends_of_a_gguf_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "<|eot_id|>"]
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4}
    model = inspect_gguf(write_gguf(tmp_path / "model.gguf", "Llama", random_model("Llama"), **keys))
    assert model.vocabulary.ends == (2, 3, 4, 0, len(tokens) - 1)


@pytest.fixture
def copied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "CodeLlamaTokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "EvilTokenizer"]
)
def test_the_named_class_does_not_change_tokens(copied: Path, name: str) -> None:
    changed(copied / "tokenizer_config.json", tokenizer_class=name, add_bos_token=True, legacy=True)
    itself, loaded = Tokenizer.from_file(str(copied / "tokenizer.json")), load_tokenizer(copied)
    for text in (*TEXTS, "<|user|> Hi <|end|>"):
        assert loaded(text)["input_ids"] == itself.encode(text).ids
    assert loaded.eos_token == "<|end|>"
    assert loaded.chat_template
    check_loadable(inspect_checkpoint(copied))


@pytest.mark.parametrize(("name", "sound"), [("GPT2Tokenizer", True), ("Qwen2Tokenizer", True), ("LlamaTokenizer", False)])
def test_a_tokenizer_class_that_loses_spaces_is_refused(copied: Path, name: str, sound: bool) -> None:
    model = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (copied / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    changed(copied / "tokenizer_config.json", tokenizer_class=name)
    with nullcontext() if sound else pytest.raises(UserError, match=r"model.path=.*tokenizer"):
        check_loadable(inspect_checkpoint(copied))
