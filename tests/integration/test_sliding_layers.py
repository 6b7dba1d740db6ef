"""A model of which a layer attends to its latest tokens alone, beside transformers' own eager attention and the oracle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_fixtures import BY_NAME, load_model, make_decoder, make_engine, make_oracle, save_model
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from pipeline.core.kv import FP16_POLICY

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.1, "max_position_embeddings": 512,
}  # fmt: skip
PROMPT, LENGTH = 200, 260
CHUNK = 50
"""Of a prefill: longer than the window."""
HALF = 2e-3
"""Keys and values are stored as float16, relative 2**-11; measured 9e-4 of the logits' standard deviation."""
FLIPS = 3e-2
"""Few values lie between two codes; measured 2e-3. A window that is one token off moves logits by far more, as a test below
shows."""
torch.set_num_threads(1)


def qwen2(window: int = 20) -> PretrainedConfig:
    return Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=window, max_window_layers=1)


@dataclass
class Family:
    """A random model, its exported decoder, and what transformers' eager attention computes of a text."""

    model: Any
    decoder: Path
    text: list[int]
    expected: np.ndarray


def eager(model: Any, text: list[int]) -> np.ndarray:
    configured, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor([text])).logits[0].numpy()
    finally:
        model.config._attn_implementation = configured
    return logits


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("qwen2")
    checkpoint = save_model(qwen2(), root / "checkpoint")
    model = load_model(checkpoint)
    text = np.random.default_rng(0).integers(0, 64, LENGTH).tolist()
    return Family(model, make_decoder(checkpoint, root / "decoder"), text, eager(model, text))


def decoded(engine: Any, text: list[int], prompt: int = PROMPT) -> np.ndarray:
    """Logits from the prompt's last token on; the batch also holds a sequence that is much shorter."""
    handles, logits = engine.prefill([text[:prompt], text[:17]])
    rows = [logits[0]] + [engine.decode(handles, [token, text[17 + i]])[0] for i, token in enumerate(text[prompt:])]
    engine.release(handles)
    return np.array(rows)


@pytest.mark.parametrize("attention", ["graph", "native"])
def test_chunked_prefill_and_decode_equal_eager_attention_beyond_the_window(
    attention: str, family: Family, tmp_path: Path
) -> None:
    engine = make_engine(family.decoder, tmp_path / "bundle", FP16_POLICY, attention=attention, prefill_chunk=CHUNK)
    scale = family.expected.std()
    expected = family.expected[PROMPT - 1 :]
    np.testing.assert_allclose(decoded(engine, family.text), expected, atol=HALF * scale)
    window = engine.shape.window(1)
    assert window is not None
    for other in (window - 1, window + 1):
        off = AutoModelForCausalLM.from_config(qwen2(other))
        off.load_state_dict(family.model.state_dict())
        difference = np.abs(eager(off.eval(), family.text)[PROMPT - 1 :] - expected).max(-1)
        assert np.median(difference) > 5 * HALF * scale, "a window that is one token off would be seen"


@pytest.mark.parametrize("attention", ["graph", "native"])
@pytest.mark.parametrize("name", ["ages", "window_of_keys_and_values"])
def test_both_attentions_equal_the_oracle_over_codes_exact_tokens_and_a_finer_window(
    name: str, attention: str, family: Family, tmp_path: Path
) -> None:
    engine = make_engine(family.decoder, tmp_path / "bundle", BY_NAME[name], attention=attention, prefill_chunk=CHUNK)
    oracle = make_oracle(family.model, BY_NAME[name], engine.shape, prefill_chunk=CHUNK)
    assert oracle.shape == engine.shape
    expected = oracle.forced(family.text, PROMPT)
    difference = np.abs(decoded(engine, family.text)[1:] - expected).max(-1) / expected.std()
    assert difference.max() < FLIPS
    assert np.median(difference) < FLIPS / 10
