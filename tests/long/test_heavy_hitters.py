"""The heavy-hitter cache (H2O) compared with a slow implementation that keeps one dictionary of tokens per head."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines.random_llama import BY_NAME, llama_config, make_reference, static_scales
from transformers import AutoModelForCausalLM

from stages.core.errors import UserError
from stages.engines.reference.attention import Span
from stages.engines.reference.cache import LayerStorage, layer_storages
from stages.engines.reference.heavy import HeavyCache, HeavyView
from stages.engines.reference.model import LayerAttention
from stages.policies.policy import SIDES, Eviction, KVPolicy, KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
EVICTION = Eviction(window_tokens=64, heavy_tokens=64)


def evicting_policy(name: str, **tokens: int) -> KVPolicy:
    eviction = EVICTION.model_copy(update=tokens)
    return BY_NAME[name].model_copy(update={"name": f"{name}_h2o", "eviction": eviction})


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config()).eval().double()


@pytest.fixture(scope="module")
def text() -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 256, 260).tolist()
    return tokens


def attend_by_definition(
    storages: LayerStorage, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunks: list[int], sinks: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """Apply the eviction rule one query at a time; return the output (H, G, S, D) and the kept tokens of each head."""
    stored = [storages[side].round(x).double() for side, x in zip(SIDES, (key, value), strict=True)]
    out, kept = torch.zeros_like(q), []
    for head in range(q.shape[0]):
        weight: dict[int, float] = {}
        begin = 0
        for count in chunks:
            end = begin + count
            before = sorted(weight)
            for row in range(begin, end):
                tokens = [*before, *range(begin, row + 1)]
                for group in range(q.shape[1]):
                    keys = [stored[0][head, t] if t < begin else key[head, t] for t in tokens]
                    scores = [float(q[head, group, row] @ k) for k in keys]
                    exponents = [math.exp(score - max(scores)) for score in scores]
                    for token, exponent in zip(tokens, exponents, strict=True):
                        share = exponent / sum(exponents)
                        weight[token] = weight.get(token, 0.0) + share
                        v = stored[1][head, token] if token < begin else value[head, token]
                        out[head, group, row] += share * v
            older = sorted(token for token in weight if sinks <= token < end - EVICTION.window_tokens)
            for token in sorted(older, key=lambda t: (-weight[t], t))[EVICTION.heavy_tokens :]:
                del weight[token]
            begin = end
        kept.append(sorted(weight))
    return out, kept


@pytest.mark.parametrize(
    ("name", "sinks", "chunks"),
    [
        ("fp16", 0, [70, 50, 40, *[1] * 20]),
        ("fp8_head", 5, [150, *[1] * 30]),
        ("int4_g32_asym_hadamard", 0, [70, 50, 40, *[1] * 20]),
    ],
)
def test_each_head_keeps_its_sinks_heavy_hitters_and_latest_tokens(name: str, sinks: int, chunks: list[int]) -> None:
    policy, length = evicting_policy(name, sink_tokens=sinks), sum(chunks)
    generator = torch.Generator().manual_seed(1)
    q = 0.3 * torch.randn(2, 2, length, 64, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, length, 64, generator=generator, dtype=torch.float64) for _ in SIDES)
    storages = layer_storages(policy, SHAPE, static_scales(policy, SHAPE))[0]
    ends = np.cumsum(chunks).tolist()
    spans = [Span(end - count, end, end - count if count > 1 else None) for count, end in zip(chunks, ends, strict=True)]
    view = HeavyView([HeavyCache.empty(policy, SHAPE, storages)], spans)
    out = view.attend(0, q, key, value, LayerAttention())
    expected, kept = attend_by_definition(storages, q, key, value, chunks, sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert view.caches[0].length == 0, "nothing is stored before the first request"
    view.store()
    assert view.caches[0].positions.tolist() == kept
    assert kept[0] != kept[1], "each head keeps its own tokens"
    assert kept[0][:sinks] == kept[1][:sinks] == list(range(sinks))
    assert view.caches[0].positions.shape[1] == 128 + sinks


@pytest.mark.parametrize("name", ["int8", "int4_tensor"])
def test_a_budget_for_every_token_evicts_nothing(name: str, model: Any, text: list[int]) -> None:
    plain = make_reference(model, BY_NAME[name], SHAPE, prefill_chunk=80)
    roomy = make_reference(model, evicting_policy(name, heavy_tokens=256), SHAPE, prefill_chunk=80)
    np.testing.assert_allclose(roomy.forced(text, 200), plain.forced(text, 200), rtol=0, atol=1e-9)
    tight = make_reference(model, evicting_policy(name), SHAPE, prefill_chunk=80)
    assert np.abs(tight.forced(text, 200) - plain.forced(text, 200)).max() > 1e-3


@pytest.mark.parametrize("name", ["fp16", "int4"])
def test_one_pass_equals_stepwise_decode_and_memory_matches_the_policy(name: str, model: Any, text: list[int]) -> None:
    policy = evicting_policy(name)
    engine = make_reference(model, policy, SHAPE, prefill_chunk=80)
    handles, _ = engine.prefill([text[:200], text[:30]])
    rows = [engine.decode(handles, [token, text[30 + i]])[0] for i, token in enumerate(text[200:])]
    np.testing.assert_allclose(np.array(rows), engine.forced(text, 200), rtol=0, atol=1e-9)
    memory = engine.memory()
    assert memory.pool_bytes == sum(policy.sequence_bytes(SHAPE, tokens) for tokens in (260, 90))
    assert (memory.pages, memory.live_tokens) == (4, 128 + 90)
    engine.release(handles)
    assert engine.memory().pool_bytes == 0


def test_a_corrupted_scale_changes_logits_and_a_refused_token_is_not_stored(model: Any, text: list[int]) -> None:
    engine = make_reference(model, evicting_policy("int8"), SHAPE)
    sound = engine.forced(text, 200)
    engine.corrupt_key_scale(4.0)
    assert np.abs(engine.forced(text, 200) - sound).max() > 1e-2
    engine.corrupt_key_scale(0.25)
    handles, _ = engine.prefill([text[:200]])
    with pytest.raises(UserError):
        engine.decode(handles, [10**6])
    assert engine.memory().live_tokens == 128
