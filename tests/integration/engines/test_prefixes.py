"""Prompts with common beginnings: reuse does not change answers, and prefixes of another cache are never found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.random_llama import BY_NAME, make_bundle

from stages.core.errors import UserError
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.paged.prefixes import PrefixCache
from stages.policies.policy import KVPolicy

CHUNK = 64
NEW = 70
"""Number of decoded tokens. They cross a page border and leave the policies' windows."""
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A prompt, prompts that share 200 and 70 of its tokens, the same prompt again, and its first four chunks."""
    rng = np.random.default_rng(0)
    long, end, other = (rng.integers(0, 256, count).tolist() for count in (280, 60, 150))
    return [long, [*long[:200], *end], [*long[:70], *other], long, long[:256]]


def load(bundle: Path, prefix_tokens: int = 0, **options: Any) -> OnnxEngine:
    return load_engine(bundle, threads=1, prefill_chunk=CHUNK, prefix_tokens=prefix_tokens, **options)


def cache(engine: OnnxEngine) -> PrefixCache:
    assert engine.prefixes is not None
    return engine.prefixes


def logits_of(engine: OnnxEngine, prompt: list[int]) -> np.ndarray:
    """Return logits (1 + NEW, V) of the prompt's last token and of decoding NEW fixed tokens."""
    (handle,), first = engine.prefill([prompt])
    after = [engine.decode([handle], [token])[0] for token in range(NEW)]
    engine.release([handle])
    return np.array([first[0], *after])


@pytest.mark.parametrize("policy", [BY_NAME[name] for name in ("ages", "streaming")], ids=lambda policy: policy.name)
def test_answers_and_logits_are_the_same_with_and_without_reuse(
    policy: KVPolicy, decoder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    bundle = make_bundle(decoder, tmp_path / "bundle", policy)
    without, reusing = load(bundle), load(bundle, prefix_tokens=4096)
    for prompt in prompts:
        np.testing.assert_allclose(logits_of(reusing, prompt), logits_of(without, prompt), atol=ROUNDING)
    # Reused chunks: 3 of the second prompt, 1 of the third, 4 of the first again, and 3 of the last, whose last chunk is
    # always computed.
    assert cache(reusing).reused_tokens == CHUNK * (3 + 1 + 4 + 3)
    assert reusing.generate(prompts, 8, ()) == without.generate(prompts, 8, ())
    while cache(reusing).evict():
        pass
    assert reusing.pool.in_use == (0, 0)
    assert reusing.memory().live_tokens == 0


def test_keys_name_all_tokens_up_to_the_end_of_a_chunk(int8: Path, prompts: list[list[int]]) -> None:
    keys = cache(load(int8, prefix_tokens=4096)).keys
    prompt = prompts[0]
    changed = [(prompt[0] + 1) % 256, *prompt[1:]]
    assert not set(keys(prompt)) & set(keys(changed))
    assert keys(prompt)[:3] == keys([*prompt[:200], *prompts[2]])[:3]
    assert [len(keys(prompt[:length])) for length in (1, 64, 65, 128, 129)] == [0, 0, 1, 1, 2]


def test_memory_is_bounded_and_eviction_is_least_recently_used(decoder: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    engine = load(make_bundle(decoder, tmp_path / "bundle", BY_NAME["window_of_keys_and_values"]), prefix_tokens=3 * CHUNK + 5)
    prefixes = cache(engine)
    first, other = prompts[0], prompts[2]
    logits_of(engine, first)
    assert list(prefixes.kept) == list(reversed(prefixes.keys(first)[:3]))  # the fourth chunk found no room
    assert engine.pool.in_use[0] == 3
    logits_of(engine, other)  # begins with the first chunk and has two more
    assert set(prefixes.kept) == {*prefixes.keys(first)[:1], *prefixes.keys(other)[1:3]}
    assert engine.pool.in_use[0] == 3
    before = prefixes.reused_tokens
    logits_of(engine, first)
    assert prefixes.reused_tokens - before == CHUNK


def test_kept_prefixes_make_room_for_live_sequences(int8: Path, prompts: list[list[int]]) -> None:
    engine = load(int8, prefix_tokens=4096, max_pages=6)
    engine.release(engine.prefill([prompts[0]])[0])
    assert engine.pool.in_use[0] == 4
    (handle,), _ = engine.prefill([prompts[2][70:]])  # three own pages
    assert engine.pool.in_use[0] <= 6
    for token in range(3 * CHUNK):  # three more pages, for which the prefixes that it does not share must be evicted
        engine.decode([handle], [token])
    assert set(cache(engine).kept) == set(cache(engine).keys(prompts[2][70:]))
    with pytest.raises(UserError, match="max_pages=6 is too small"):
        engine.prefill([prompts[0]])
    assert cache(engine).kept == {}
    engine.release([handle])
    assert engine.pool.in_use[0] == 0


def test_no_failure_leaves_a_sequence_with_pages(int8: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(int8, prefix_tokens=4096)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "_prefill", fail)
    with pytest.raises(MemoryError):
        engine.prefill([prompts[0]])
    assert engine.pool.sequences == {}


def test_prefixes_that_cannot_be_kept_are_refused(int8: Path) -> None:
    refusals = {
        "prefill_chunk must be a multiple of 64 if prefixes are kept, got 100": (100, 400),
        "prefix_tokens must be 0 or at least prefill_chunk=128, got 100": (128, 100),
        "prefix_tokens must be 0 or at least prefill_chunk=64, got -1": (64, -1),
    }
    for message, (chunk, tokens) in refusals.items():
        with pytest.raises(UserError, match=message):
            load_engine(int8, threads=1, prefill_chunk=chunk, prefix_tokens=tokens)
