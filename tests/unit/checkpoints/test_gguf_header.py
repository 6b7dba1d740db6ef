"""GGUF files are refused by their header alone, in one line."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from helpers.checkpoints.gguf_files import VOCAB_SIZE, bpe_metadata, random_model, write_gguf

from stages.checkpoints.gguf.header import read_header, tensor_types
from stages.checkpoints.gguf.model import inspect_gguf
from stages.core.errors import UserError
from stages.policies.policy import KVShape


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", "Llama", random_model("Llama"))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        _ = inspect_gguf(path).names
    text = str(caught.value)
    assert text.startswith(f"model.path={path}: ")
    assert text.isprintable()
    return text


def test_a_header_describes_the_converted_checkpoint(small: Path) -> None:
    info = inspect_gguf(small).info
    assert (info.architecture, info.shape, info.q_heads) == ("LlamaForCausalLM", KVShape(2, 2, 16), 4)
    assert (info.vocab_size, info.max_positions) == (VOCAB_SIZE, 512)


@pytest.mark.parametrize("offset", [lambda _: 0, lambda old: old - 32, lambda old: old + 4, lambda old: old + 32])
def test_tensors_that_share_bytes_or_leave_a_gap_are_refused(small: Path, tmp_path: Path, offset: Callable[[int], int]) -> None:
    content, name = small.read_bytes(), b"blk.1.attn_norm.weight"
    at = content.index(name) + len(name)
    at += 4 + 8 * struct.unpack_from("<I", content, at)[0] + 4
    (old,) = struct.unpack_from("<Q", content, at)
    assert "but the previous tensor ends at byte" in refusal(
        alter_file(small, tmp_path / "m.gguf", at, struct.pack("<Q", offset(old)))
    )


def test_the_package_dequantizes_every_type_of_tensor() -> None:
    for number, (_, block, block_bytes) in tensor_types().items():
        stored = np.zeros((3, block_bytes), np.uint8)
        assert dequantize(stored, gguf.GGMLQuantizationType(number)).shape == (3, block)


GEMMA3 = {"gemma3__attention__causal": True}
"""A key without effect, which makes the file a Gemma 3."""


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"general__type": "adapter"}, "general.type=adapter"),
        ({"split__count": 3}, "one of 3 shards; join them"),
        ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window=64 is not supported"),
        ({"llama__logit_scale": 2.0}, "llama.logit_scale=2.0 is not supported"),
        ({"llama__attention__head_count_kv": [2, 4]}, "llama.attention.head_count_kv must be a positive int, got [2, 4]"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "must be a positive float, got nan"),
        ({"llama__block_count": 4_000_000_000}, "llama.block_count=4000000000"),
        ({"llama__block_count": 3}, "tensor blk.2.attn_q.weight is missing"),
        ({"llama__block_count": 1}, "tensor blk.1.attn_k.weight does not belong to a llama"),
        ({"attention_bias": True}, "tensor blk.0.attn_k.bias does not belong to a llama"),
        ({"llama__feed_forward_length": 128}, "has shape (96, 64); a llama of this size has shape (128, 64)"),
        ({"llama__rope__dimension_count": 8}, "attention.key_length, attention.value_length and rope.dimension_count differ"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type=longrope is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.factor must be a positive float, got None"),
        ({"rope_freqs": [1.0, 2.0]}, "rope_freqs.weight must be 8 values"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model=bert is not supported"),
        ({"tokenizer__ggml__pre": "jais"}, "tokenizer.ggml.pre=jais: kvgate does not know how this tokenizer splits text"),
        ({"tokenizer__ggml__merges": ["h q"]}, "'h q' is not a merge of two tokens to a token"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "tokenizer.ggml.tokens must be different, non-empty texts"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type must be"),
        ({"tokenizer__ggml__eos_token_id": 99_999}, "tokenizer.ggml.eos_token_id=99999 is outside its"),
        ({"tokenizer__ggml__eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__add_bos_token": True}, "texts begin with BOS"),
        (GEMMA3 | bpe_metadata(), "Gemma 3 has a tokenizer of kind llama"),
        (GEMMA3 | {"tokenizer__ggml__add_space_prefix": None}, "a tokenizer of kind llama that puts no space before"),
        ({"gemma3__attention__sliding_window": None}, "gemma3.attention.sliding_window must be a positive int, got None"),
        ({"gemma3__final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping=30.0 is not supported"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(f"{key}={str(values)[:16]}" for key, values in value.items()),
)
def test_a_file_that_would_be_converted_wrongly_is_refused(keys: dict[str, Any], problem: str, tmp_path: Path) -> None:
    family = "Gemma3" if any(key.startswith("gemma3") for key in keys) else "Llama"
    model = random_model(family, attention_bias=keys.get("attention_bias", False))
    metadata = {key: value for key, value in keys.items() if key != "attention_bias"}
    assert problem in refusal(write_gguf(tmp_path / "model.gguf", family, model, **metadata))


def alter_file(small: Path, path: Path, at: int, content: bytes) -> Path:
    data = bytearray(small.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)
    return path


def test_an_array_that_claims_more_than_the_file_is_refused(small: Path, tmp_path: Path) -> None:
    key = small.read_bytes().index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type")
    for count, problem in ((2**62, "values of metadata"), (3_900_000, "it is truncated")):
        assert problem in refusal(alter_file(small, tmp_path / "model.gguf", key + 8, struct.pack("<Q", count)))


def test_a_truncated_file_is_refused_wherever_it_ends(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    for length in (0, 3, 4, 11, 24, 40, 1000, len(data) // 2, len(data) - 40):
        (tmp_path / "model.gguf").write_bytes(data[:length])
        text = refusal(tmp_path / "model.gguf")
        assert "truncated" in text or (length < 4 and "not a GGUF" in text), length


def test_an_altered_header_is_read_or_refused_and_never_a_defect(small: Path, tmp_path: Path) -> None:
    header_bytes = min(tensor.offset for tensor in read_header(small).tensors.values())
    generator = random.Random(0)
    refusals = []
    for _ in range(100):
        at = generator.randrange(header_bytes)
        path = alter_file(small, tmp_path / "model.gguf", at, generator.randbytes(generator.choice((1, 4, 8))))
        try:
            inspect_gguf(path)
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert all(text.isprintable() for text in refusals)
