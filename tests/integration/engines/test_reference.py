"""The reference engine: one pass against stepwise decoding and against transformers with a rounding cache."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines.random_llama import (
    BY_NAME,
    POLICIES,
    STEPS,
    forced,
    llama_config,
    make_reference,
    random_texts,
    static_scales,
)
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, Qwen2Config, Qwen3Config

from stages.engines.reference.attention import Fed
from stages.engines.reference.cache import Storage, layer_storages
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.measured_once import cache_statistics
from stages.policies.policy import KVPolicy, KVShape, Side

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 300]
"""Prompt lengths around the ends of pages. 300 is longer than any policy keeps exact."""
CHUNK = 80
"""Prefill chunk in tokens. Prompts need several chunks, which read the pool of earlier chunks."""
EXACT = 1e-9
"""In float64, only the order of sums differs (1e-15). No value is this close to the border between two codes."""
ROUNDING = 2e-5
"""Allowed difference from the order of float32 sums: measured 4e-6."""


def random_model(config: Any = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or llama_config(), attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model()


@pytest.fixture(scope="module")
def model64() -> Any:
    return random_model().double()


SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return random_texts(LENGTHS)


def one_pass(engine: TorchEngine, texts: list[list[int]], steps: int = STEPS) -> np.ndarray:
    """Return logits (steps, B, V) of decoding the last tokens of every text."""
    return np.stack([engine.forced(text, len(text) - steps) for text in texts], axis=1)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_one_pass_equals_decoding_a_ragged_batch_token_by_token(policy: KVPolicy, model64: Any, texts: list[list[int]]) -> None:
    engine = make_reference(model64, policy, SHAPE, prefill_chunk=CHUNK)
    np.testing.assert_allclose(one_pass(engine, texts), forced(engine, texts)[1:], rtol=0, atol=EXACT)


def test_a_window_and_a_page_border_are_crossed_in_one_pass(model64: Any) -> None:
    text = np.random.default_rng(1).integers(0, 256, 150).tolist()
    engine = make_reference(model64, BY_NAME["ages"], SHAPE, prefill_chunk=CHUNK)
    np.testing.assert_allclose(one_pass(engine, [text], 80), forced(engine, [text], 80)[1:], rtol=0, atol=EXACT)


def test_statistics_describe_transformers_own_keys_and_values(model: Any, texts: list[list[int]]) -> None:
    with torch.no_grad():
        layers = model(torch.tensor(texts[-1:]), use_cache=True).past_key_values.layers
    ratios = {}
    for name in ("fp8_head", "int4"):
        engine = make_reference(model, BY_NAME[name], SHAPE)
        measured = cache_statistics(engine, texts[-1])
        assert [(entry.layer, entry.side) for entry in measured] == [(0, "key"), (0, "value"), (1, "key"), (1, "value")]
        for entry in measured:
            exact = getattr(layers[entry.layer], f"{entry.side}s")[0]
            assert (entry.low, entry.high) == pytest.approx((float(exact.min()), float(exact.max())), rel=1e-5)
            assert entry.p999 == pytest.approx(np.quantile(exact.abs().numpy(), 0.999), rel=1e-5)
            storage = engine.storages[entry.layer][Side(entry.side)]
            error = storage.round(exact) - exact
            assert entry.snr_db == pytest.approx(20 * float(torch.log10(exact.norm() / error.norm())), abs=0.05)
        ratios[name] = measured[0].snr_db or 0.0
    assert ratios["fp8_head"] > ratios["int4"] + 6


class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers is not followed
    """transformers' own cache with past tokens rounded by the policy's base formats. It shares no code with the attention."""

    def __init__(self, storages: list[dict[Any, Storage]]) -> None:
        super().__init__()
        self.storages = storages

    def update(self, key: Any, value: Any, layer: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key, value, layer)
        past = keys.shape[-2] - key.shape[-2]
        return self.rounded(keys, layer, "key", past), self.rounded(values, layer, "value", past)

    def rounded(self, x: torch.Tensor, layer: int, side: str, past: int) -> torch.Tensor:
        storage = self.storages[layer][side]
        return torch.cat([storage.round(x[..., :past, :]).to(x.dtype), x[..., past:, :]], dim=-2)


def by_transformers(model: Any, policy: KVPolicy, text: list[int], steps: int) -> np.ndarray:
    config = model.config
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    cache = RoundingCache(layer_storages(policy, shape, static_scales(policy, shape)))
    rows = []
    with torch.no_grad():
        model(torch.tensor([text[:-steps]]), past_key_values=cache)
        for token in text[-steps:]:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].numpy())
    return np.stack(rows)


SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.08}  # fmt: skip


FIRST_SLIDES = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize("name", ["int8_channel", "int4_g32_asym_hadamard"])
@pytest.mark.parametrize(
    "config",
    [
        llama_config(),
        MistralConfig(**SIZES, sliding_window=50),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=70, max_window_layers=1),
        Qwen3Config(**SIZES),
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=1, layer_types=FIRST_SLIDES),
    ],
    ids=lambda config: f"{config.model_type}-{getattr(config, 'sliding_window', None)}",
)
def test_every_family_equals_transformers_over_a_rounding_cache(config: Any, name: str) -> None:
    model = random_model(config).double()
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    engine = make_reference(model, BY_NAME[name], shape)
    text = np.random.default_rng(2).integers(0, 256, 140).tolist()
    expected = by_transformers(model, BY_NAME[name], text, 10)
    np.testing.assert_allclose(engine.forced(text, 130), expected, rtol=0, atol=EXACT)
    assert model.config._attn_implementation == "sdpa", "the model's attention is restored"


def test_a_non_finite_value_is_refused_and_not_stored(texts: list[list[int]]) -> None:
    broken = random_model()
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = torch.nan
    engine = make_reference(broken, BY_NAME["int4"], SHAPE)
    sound = [token for token in texts[5] if token != 7]
    handles, _ = engine.prefill([sound[:60], sound[60:90]])
    with pytest.raises(ValueError, match=r"model\.path: a key of layer 0 is not finite"):
        engine.decode(handles, [1, 7])
    assert engine.memory().live_tokens == 90
    after = engine.decode(handles[:1], [1])
    np.testing.assert_array_equal(after, forced(engine, [[*sound[:60], 1]], 1)[1])
    with pytest.raises(ValueError, match="a key of layer 0 is not finite"):
        engine.prefill([[1, 2], [3, 4, 7, 5]])
    assert engine.memory().live_tokens == 91
    with pytest.raises(ValueError, match="a key of layer 0 is not finite"):
        engine.forced([*sound[:60], 7, 3], 30)

    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = 0.0
        broken.model.layers[1].self_attn.v_proj.weight[70] = torch.inf
    with pytest.raises(ValueError, match="a value of layer 1 is not finite"):
        engine.prefill([sound[:5]])


@pytest.mark.parametrize("name", ["fp16", "int4", "fp8k_int4v_aged", "window_of_keys_and_values"])
def test_a_corrupted_key_scale_changes_one_pass_and_decode_equally(name: str, model64: Any, texts: list[list[int]]) -> None:
    texts = texts[-2:]
    engine = make_reference(model64, BY_NAME[name], SHAPE)
    sound = one_pass(engine, texts)
    handles, before = engine.prefill([text[:-STEPS] for text in texts])
    engine.corrupt_key_scale(3.0)
    faulty = one_pass(engine, texts)
    np.testing.assert_array_equal(engine.decode(handles, [text[-STEPS] for text in texts]), forced(engine, texts)[1])
    np.testing.assert_allclose(faulty, forced(engine, texts)[1:], rtol=0, atol=EXACT)
    np.testing.assert_array_equal(engine.prefill([text[:-STEPS] for text in texts])[1], before)
    assert np.abs(faulty - sound).max(-1)[:, -1].min() > 0.01, "policies keep only a part of the longest text exact"


def test_tokens_read_from_the_cache_need_only_one_replay(model: Any) -> None:
    """Test reads_itself, for engines that store a token before they attend: chunking a prompt then changes nothing."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, 150).tolist()
    engine = make_reference(model, BY_NAME["fp8"], SHAPE)
    engine.reads_itself = True
    rows = engine.forced(tokens, 100)
    engine.prefill_chunk = 7
    np.testing.assert_allclose(engine.forced(tokens, 100), rows, atol=ROUNDING)
    engine.prefill_chunk = 64
    (replay,) = engine.replay([Fed(tokens, [(100, False), (50, True)])])
    np.testing.assert_allclose(replay.logits[1:], rows, atol=ROUNDING)
    engine.reads_itself = False
    assert np.abs(engine.forced(tokens, 100) - rows).max() > 100 * ROUNDING
    exact = make_reference(model, BY_NAME["fp16"], SHAPE)
    plain = exact.forced(tokens, 100)
    exact.reads_itself = True
    np.testing.assert_allclose(exact.forced(tokens, 100), plain, atol=1e-2)
