"""A tokenizer.json gives the tokens that it describes, regardless of the configured class, or the checkpoint is refused."""

import json
import shutil
from pathlib import Path

import pytest
from hostile import changed
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_tokenizer
from stages.checkpoints.opening import TEXTS, check_opens
from stages.core.errors import UserError

CLASSES = ("Llama", "CodeLlama", "Qwen2", "Gemma", "GPT2", "Evil")


@pytest.fixture
def copied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.mark.parametrize("name", [f"{name}Tokenizer{fast}" for name in CLASSES for fast in ("", "Fast")])
def test_the_named_class_does_not_change_tokens(copied: Path, name: str) -> None:
    changed(copied / "tokenizer_config.json", tokenizer_class=name, add_bos_token=True, legacy=True)
    itself, loaded = Tokenizer.from_file(str(copied / "tokenizer.json")), load_tokenizer(copied)
    for text in (*TEXTS, "<|user|> Hi <|end|>"):
        assert loaded(text)["input_ids"] == itself.encode(text).ids
    assert loaded.eos_token == "<|end|>"
    assert loaded.chat_template
    check_opens(inspect_checkpoint(copied))


@pytest.mark.parametrize(("name", "sound"), [("GPT2Tokenizer", True), ("Qwen2Tokenizer", True), ("LlamaTokenizer", False)])
def test_a_class_that_loses_spaces_of_a_vocabulary_with_merges_is_refused(copied: Path, name: str, sound: bool) -> None:
    model = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (copied / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    changed(copied / "tokenizer_config.json", tokenizer_class=name)
    if sound:
        check_opens(inspect_checkpoint(copied))
        return
    with pytest.raises(UserError, match=r"model.path=.*tokenizer"):
        check_opens(inspect_checkpoint(copied))
