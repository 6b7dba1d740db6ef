"""Questions about long documents: their facts, the cut to a length, and refusals."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.registry.judged_engine import config_of
from helpers.verdicts.evaluations import builtin_workloads

from pipeline.chain.inputs import _check_lengths
from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.lengths import SLACK, fit_lengths, long_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode, encode_rounds
from stages.workloads.config import LONG_QUESTIONS, WorkloadsConfig
from stages.workloads.documentation import SPLITS, pages
from stages.workloads.long import CODES, document_slot, make_questions
from stages.workloads.user_files import document_words

DOCUMENTS = [document_slot(2048, number, seed=0) for number in range(8)]
RECORD = re.compile(r"The (code|home) of |\{\"ware")
CODE = re.compile(r"The code of the (\w+) is (\d{4})\.")


def document(sample: Sample) -> str:
    return sample.messages[0][1].rpartition("\n\n")[0]


def long_workloads(**changes: Any) -> WorkloadsConfig:
    return builtin_workloads(**{"lengths": [1216, 1536], "length_documents": 2, **changes})


@pytest.mark.parametrize("split", SPLITS)
def test_a_document_quotes_only_the_pages_of_its_split(split: Any) -> None:
    slot = document_slot(2048, 0, seed=0, split=split)
    lines = document(make_questions(slot, 30_000)[0]).split("\n")
    prose = " ".join(line for line in lines if line and not RECORD.match(line))
    for page_split in SPLITS:
        paragraphs = [paragraph for page in pages(page_split) for paragraph in page]
        assert sum(paragraph in prose for paragraph in paragraphs) == (len(paragraphs) if page_split == split else 0)


@pytest.mark.parametrize("slot", DOCUMENTS, ids=lambda slot: slot.id)
def test_the_seven_questions_cover_every_third_and_every_kind(slot: Any) -> None:
    by_kind = {sample.id.rpartition("-")[2]: sample for sample in make_questions(slot, 500)}
    assert list(by_kind) == ["early", "middle", "late", "instruction", "turn", "summary", "json"]
    assert len(by_kind) == LONG_QUESTIONS
    (text,) = {document(sample) for sample in by_kind.values()}
    codes = dict(CODE.findall(text))
    assert len(codes) == len(set(codes.values())) == CODES
    for third, kind in enumerate(("early", "middle", "late")):
        sample = by_kind[kind]
        assert text.count(sample.reference) == 1
        assert int(3 * text.index(sample.reference) / len(text)) == third
    home, code = by_kind["instruction"].mentions
    assert text.index(home) < text.index(code)  # a late instruction reads an early fact
    assert by_kind["turn"].reference not in text
    assert by_kind["turn"].reference in by_kind["turn"].messages[-5][1]
    assert len(by_kind["summary"].mentions) == 3
    assert by_kind["json"].reference in text
    for sample in by_kind.values():
        answers = " ".join(text for role, text in sample.messages if role == "assistant")
        assert not any(value in answers for value in sample.mentions), "an example contains the answer"
        assert judge(sample, sample.reference)
        scored = [sample.reference[start:stop] for start, stop in sample.results]
        if sample.check == "json":
            assert scored == [str(json.loads(sample.reference)[name]) for name in ("euros", "kilos")]
            assert not judge(sample, sample.reference.replace(scored[0], "1"))
            continue
        assert scored == list(sample.mentions)
        wrong = set(codes.values()) - set(sample.mentions)
        assert len(wrong) > 20
        assert wrong <= {*sample.distractors}
        for distractor in sample.distractors:
            assert not judge(sample, sample.reference.replace(sample.mentions[0], distractor))


def test_a_document_quotes_the_users_texts_from_a_random_word_on(tmp_path: Path, tiny_checkpoint: Path) -> None:
    words = [f"word{number}" for number in range(3000)]
    (tmp_path / "a.txt").write_text("\n".join(words[:2000]))
    (tmp_path / "b.md").write_text(" ".join(words[2000:]))
    config, tokenizer = long_workloads(documents=str(tmp_path)), BundleTokenizer(tiny_checkpoint)
    firsts = set()
    for sample in fit_lengths(long_samples(config), tokenizer, config):
        quoted = [word for word in document(sample).split() if re.fullmatch(r"word\d+", word)]
        firsts.add(quoted[0])
        assert quoted == [f"word{(int(quoted[0][4:]) + number) % 3000}" for number in range(len(quoted))]
    assert len(firsts) == 4  # documents
    assert "word7\nword8" in document(make_questions(DOCUMENTS[0], 3000, document_words(config))[0])


@pytest.mark.parametrize(
    ("content", "changes", "refusal"),
    [
        (b"", {"documents": "empty"}, "has no text files; give a directory with files that end with .txt or .md"),
        (b"a " * 200, {}, "200 words are too few to fill 1,536 tokens; give at least 384 words, or lower workloads.lengths"),
        (b"\xff " * 2000, {}, "is not UTF-8 .*; give a text in UTF-8"),
        ("a word ".encode("utf-16-le") * 2000, {}, "holds null characters; give a text in UTF-8"),
        (b"a", {"documents": "missing"}, "no such file"),
    ],
)
def test_unsuitable_texts_are_refused(tmp_path: Path, content: bytes, changes: dict[str, str], refusal: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_bytes(content)
    config = long_workloads(documents=str(tmp_path / changes.get("documents", "a.txt")))
    with pytest.raises(UserError, match=rf"^workloads.documents=\S+: {refusal}"):
        long_samples(config)


def test_lengths_replace_samples_and_bins_and_texts_need_lengths() -> None:
    config = long_workloads(lengths=[8192, 1024])
    assert (config.samples, config.context_bins) == ({}, [0, 768, 6144])
    assert WorkloadsConfig.model_validate(config.model_dump()) == config
    assert long_workloads(lengths=[2049, 2048]).context_bins == [0, 1536]
    without_lengths: dict[str, Any] = {"lengths": []}
    for changes in (without_lengths, {"jsonl": "mine.jsonl"}):
        with pytest.raises(ValueError, match=r"documents: needs workloads.lengths and excludes workloads.jsonl; give lengths"):
            long_workloads(documents="texts", **changes)


@pytest.mark.parametrize("chat", [True, False])
def test_documents_fill_their_lengths_and_share_one_prefix(chat: bool, tiny_checkpoint: Path) -> None:
    tokenizer, config = BundleTokenizer(tiny_checkpoint), long_workloads()
    if not chat:
        tokenizer._tokenizer.chat_template = None
    encoded = encode_rounds(long_samples(config), tokenizer, config)
    assert len(encoded) == 2 * 2 * LONG_QUESTIONS
    for name in dict.fromkeys(item.sample.document for item in encoded):
        items = [item for item in encoded if item.sample.document == name]
        length = int(items[0].sample.workload.removeprefix("long_"))
        longest = max(len(item.prompt) + len(item.reference) + config.extra_new_tokens for item in items)
        assert length - SLACK <= longest <= length
        (shared,) = {item.prompt[: item.shared] for item in items}
        assert len(tokenizer.text_ids(document(items[0].sample))) < len(shared) < min(len(item.prompt) for item in items)
        assert all(item.results for item in items)


def test_a_length_that_is_too_short_is_refused_with_the_minimum(tiny_checkpoint: Path) -> None:
    tokenizer, config = BundleTokenizer(tiny_checkpoint), long_workloads(lengths=[512])
    with pytest.raises(UserError, match=r"workloads.lengths=512: .* alone take up to .* give at least 1,\d+") as refusal:
        fit_lengths(long_samples(config), tokenizer, config)
    minimum = int(str(refusal.value).rpartition(" ")[2].replace(",", ""))
    shortest = long_workloads(lengths=[minimum])
    assert encode(fit_lengths(long_samples(shortest), tokenizer, shortest), tokenizer, 64)


@pytest.mark.parametrize(
    ("overrides", "memory", "refusal"),
    [
        (["backend=tensorrt_rtx", "backend.max_tokens=640", "workloads.lengths=[1024]"], 1 << 40, "is configured for 640 tok"),
        (
            ["workloads.lengths=[1024,32768]"],
            100 << 20,
            "lengths=32768: with 4 sequences of 32,768 tokens the cache takes .*; lower it: about 12,8.. tokens fit",
        ),
    ],
)
def test_lengths_that_cannot_be_judged_are_refused_in_one_line(
    overrides: list[str], memory: int, refusal: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=memory))
    with pytest.raises(UserError, match=refusal) as refused:
        _check_lengths(config_of(*overrides), inspect_checkpoint(tiny_checkpoint))
    assert "\n" not in str(refused.value)
