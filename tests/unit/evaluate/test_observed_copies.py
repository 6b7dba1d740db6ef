"""A forced sequence keeps the codes of evicted tokens that were observed, and shares equal tokens with its origin."""

import numpy as np

from stages.core.records import StoredCopy
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.policy import Side

SINKS = 64


def cache_copy(tokens: int, kept_from: int) -> list[dict[Side, StoredCopy]]:
    """Return the copy of a cache with the sinks and the tokens from `kept_from` on. Codes are positions."""
    codes = np.arange(tokens, dtype=np.uint8).reshape(1, tokens, 1)
    codes[:, SINKS:kept_from] = 0
    evicted = ((SINKS, kept_from),) if kept_from > SINKS else ()
    return [{Side.KEY: StoredCopy(0, codes, None, None, None, None, evicted)}]


def observe(*caches: tuple[int, int]) -> StoredCopy:
    """Return the copy after observing these caches, (tokens, kept_from), in order."""
    sequence = ForcedSequence("", [])
    for tokens, kept_from in caches:
        sequence.observe(cache_copy(tokens, kept_from))
    return sequence.layers[0][Side.KEY]


def known_positions(copy: StoredCopy) -> list[int]:
    """Return the positions whose codes the copy has, without its evicted positions."""
    lost = {position for start, stop in copy.evicted for position in range(start, stop)}
    codes = copy.codes[0, :, 0].tolist()
    assert all(code == (0 if position in lost else position) for position, code in enumerate(codes))
    return sorted(set(range(len(codes))) - lost)


def test_tokens_observed_before_eviction_keep_their_codes() -> None:
    assert known_positions(observe((100, 64), (130, 64), (200, 128))) == list(range(200))


def test_tokens_evicted_between_two_observations_are_lost() -> None:
    copy = observe((80, 64), (150, 128), (160, 128), (250, 192))
    assert copy.evicted == ((80, 128), (160, 192))
    assert known_positions(copy) == [*range(80), *range(128, 160), *range(192, 250)]


def test_a_sink_token_after_the_first_observation_is_known() -> None:
    copy = observe((63, 64), (200, 128))
    assert copy.evicted == ((64, 128),)
    assert known_positions(copy) == [*range(64), *range(128, 200)]


PROMPT, COMMON = 90, 95
"""Tokens of the prompt, and tokens that a fork has in common with its origin."""


def forced(later: range) -> ForcedSequence:
    """Return a sequence of COMMON tokens and then others, with logits for the others only, like a fork."""
    tokens, logits = [*range(COMMON), *later], np.zeros(1, np.float32)
    sequence = ForcedSequence("", tokens[:PROMPT])
    sequence.feed(sequence.prompt, logits, None, decoded=False)
    for token in tokens[PROMPT:]:
        sequence.feed([token], logits, None, decoded=True)
    sequence.observe(cache_copy(len(tokens), SINKS))
    sequence.places = sequence.places[-len(later) :]
    return sequence


def test_a_fork_shares_equal_tokens_with_equal_codes() -> None:
    origin, fork = forced(range(100, 112)), forced(range(200, 250))
    assert fork.shared_tokens(origin, 64) == COMMON
    codes = fork.layers[0][Side.KEY].codes
    codes[0, COMMON - 1, 0] ^= 1
    assert fork.shared_tokens(origin, 64) == 0
    codes[0, COMMON - 1, 0] ^= 1
    fork.tokens[70] = 0
    assert fork.shared_tokens(origin, 64) == 64, "the last whole chunk before the different token"
