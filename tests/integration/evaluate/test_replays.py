"""Replays on the reference engine: a fork shares the tokens that it has in common with its origin, and no others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.engines.random_llama import BY_NAME, make_reference

from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.policy import KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
PROMPT, COMMON = 90, 95
"""Tokens of the prompt; tokens that both sequences have in common, including decoded tokens."""


def comparer_of(model: Any, name: str = "int8") -> SequenceComparer:
    """Return a comparer of a reference engine with another reference engine of the same policy."""
    engine, reference = (make_reference(model, BY_NAME[name], SHAPE, prefill_chunk=64) for _ in range(2))
    return SequenceComparer(engine, ReferenceEngine(reference))


def decode_sequence(comparer: SequenceComparer, tokens: list[int], rows: int) -> ForcedSequence:
    """Return a sequence of the engine with the logits of its last `rows` tokens."""
    engine, sequence = comparer.engine, ForcedSequence("a sequence", tokens[:PROMPT])
    (handle,), logits = engine.prefill([sequence.prompt])
    sequence.feed(sequence.prompt, logits[0], None, decoded=False)
    for token in tokens[PROMPT:]:
        if comparer.frees_next(sequence):
            comparer.observe(sequence, handle)
        sequence.feed([token], engine.decode([handle], [token])[0], None, decoded=True)
    comparer.observe(sequence, handle)
    engine.release([handle])
    sequence.logits, sequence.places = sequence.logits[-rows:], sequence.places[-rows:]
    return sequence


def pair(comparer: SequenceComparer) -> tuple[ForcedSequence, ForcedSequence]:
    """Return two sequences with COMMON equal tokens; the second has logits only for later tokens, like a fork."""
    rng = np.random.default_rng(0)
    counts = (COMMON, 12, 50)
    common, first, second = (rng.integers(0, comparer.engine.vocab_size, count).tolist() for count in counts)
    return decode_sequence(comparer, common + first, 18), decode_sequence(comparer, common + second, 50)


@pytest.mark.parametrize("name", ["int8", "int4_sinks", "evicted_ages"])
def test_a_fork_replayed_from_its_origin_has_the_same_results(model: Any, name: str) -> None:
    comparer = comparer_of(model, name)
    origin, fork = pair(comparer)
    assert fork.shared_tokens(origin, 64) in {0, COMMON}  # 0 if the fork has evicted a page that the origin still holds
    together, ((alone, _),) = comparer.replay([origin, fork]), comparer.replay([fork])
    shared = together[1][0]
    rows = len(fork.logits)
    assert len(shared.logits) == (rows if fork.shared_tokens(origin, 64) else 1 + len(fork.tokens) - PROMPT)
    np.testing.assert_allclose(shared.tail(rows).logits, alone.tail(rows).logits, atol=1e-4)
    for layer, other in zip(shared.errors, alone.errors, strict=True):
        for side, errors in layer.items():
            np.testing.assert_allclose(errors.engine, other[side].engine, atol=1e-5)
    record, expected = (comparer.compare(fork, replay, "").record for replay in (shared, alone))
    assert record.times_allowed(64.0) < 1
    assert record.rounding.kl_mean == pytest.approx(expected.rounding.kl_mean, rel=1.0)


def test_a_fork_with_other_codes_or_tokens_is_replayed_in_full(model: Any) -> None:
    origin, fork = pair(comparer_of(model))
    side, copy = next(iter(fork.layers[1].items()))
    codes = copy.codes.copy()
    codes[0, COMMON - 1, 0] ^= 1
    fork.layers[1][side] = replace(copy, codes=codes)
    assert fork.shared_tokens(origin, 64) == 0
    codes[0, COMMON - 1, 0] ^= 1
    fork.tokens[70] = 1 + origin.tokens[70] % 8
    assert fork.shared_tokens(origin, 64) == 64  # the last whole chunk before the different token
