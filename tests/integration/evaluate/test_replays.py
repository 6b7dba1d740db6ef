"""Replays on the reference engine: a fork shares the tokens that it has in common with its origin, and no others."""

from dataclasses import replace
from typing import Any

import numpy as np
from helpers.engines.random_llama import BY_NAME, make_reference

from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.policy import KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64)
PROMPT, COMMON = 90, 95
"""Tokens of the prompt; tokens that both sequences have in common, including decoded tokens."""


def comparer_of(model: Any) -> SequenceComparer:
    """Return a comparer of a reference engine with another reference engine of the same policy."""
    engine, reference = (make_reference(model, BY_NAME["int8"], SHAPE, prefill_chunk=64) for _ in range(2))
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
