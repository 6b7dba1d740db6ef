"""A converted Gemma 3 270M reproduces llama.cpp's results, which are recorded in benchmarks/results/gguf_gemma3.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.documentation import GEMMA3
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.gguf.convert import convert_gguf
from stages.checkpoints.loading import load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / GEMMA3).is_file(), reason="Gemma 3 270M is not there: make gemma3")
RECORDED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "gguf_gemma3.json").read_text())
TOLERANCE = 0.03
"""Allowed difference of log probabilities in nats: the checkpoint rounds the weights to float16."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gemma3")
    convert_gguf(ROOT / GEMMA3, out, progress=lambda *_: None)
    return out


def test_the_shape_and_the_windows_are_gemmas(checkpoint: Path) -> None:
    shape = inspect_checkpoint(checkpoint).shape
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (18, 1, 256)
    assert shape.windows == (512, 512, 512, 512, 512, None) * 3


def test_tokens_of_many_scripts_equal_llama_cpps(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    for recorded in RECORDED["texts"]:
        assert tokenizer(recorded["text"])["input_ids"] == recorded["ids"], recorded["text"]
        assert tokenizer.decode(recorded["ids"][1:]) == recorded["text"].replace("▁", " ")


def test_logits_beyond_the_window_equal_llama_cpps(checkpoint: Path) -> None:
    model = load_causal_lm(checkpoint, dtype=torch.float32)
    rows = [int(row) for row in RECORDED["likely"]]
    assert max(rows) > 700
    with torch.no_grad():
        logits = model(torch.tensor([RECORDED["tokens"]]), logits_to_keep=torch.tensor(rows)).logits[0]
    for row, likely in zip(torch.log_softmax(logits, -1), RECORDED["likely"].values(), strict=True):
        tokens, logs = zip(*likely, strict=True)
        torch.testing.assert_close(row[list(tokens)], torch.tensor(logs), rtol=0, atol=TOLERANCE)
